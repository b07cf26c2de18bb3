"""A checkpoint may take as long as many steps: the worker trains on, and commits nothing before its time."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.config.loading import load
from common.contracts.sequences import SequenceSet
from services.drafter_worker import checkpoint
from services.drafter_worker.assemble import Place, open_worker
from services.drafter_worker.checkpoint import read_trainer
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.worker import DrafterWorker
from tests.rings import wait_until
from tests.runs import make_run, start
from tests.series import account_of, newest_of, state_of

pytestmark = pytest.mark.timeout(300)
STEPS_A_CHECKPOINT, STEPS_A_WRITE = 10, 25


@contextlib.contextmanager
def worker_of(tmp_path: Path) -> Iterator[DrafterWorker]:
    """A worker of this process, beside a target server."""
    config = make_run(tmp_path, num_conversations=300)
    settings = [f"training.checkpoint_steps={STEPS_A_CHECKPOINT}", "training.keep_checkpoints=50"]
    target = start("services.target_server", "--config", config, log=tmp_path / "target.log")
    with contextlib.ExitStack() as last, contextlib.ExitStack() as stack:
        last.callback(target.kill)
        opened = open_worker(
            load(WorkerConfig, [config], settings), Place(0, "main-0", None), threading.Event(),
            stack, lambda phase: None,
        )  # fmt: skip
        assert opened is not None
        yield opened
        stack.pop_all().close()
        assert target.wait(60) == 0


class SlowDisk:
    """Writes a trainer's state only when so many steps have been made meanwhile."""

    def __init__(self, worker: DrafterWorker, save_file: Callable[..., None]) -> None:
        self._worker, self._save_file = worker, save_file
        self.written: list[int] = []
        self.committed_early: set[int] = set()

    def save_file(self, *arguments: Any) -> None:
        worker, began_at = self._worker, self._worker._progress.step
        (ring,) = worker._parts.rings.rings
        if worker.phase != "saving":  # nobody waits for it
            wait_until(
                lambda: (
                    worker._progress.step >= began_at + STEPS_A_WRITE
                    or worker.phase in ("saving", "draining")
                ),
                f"steps behind step {began_at}, whose checkpoint is being written",
            )
        newest = worker._parts.store.newest()
        durable = read_trainer(newest)[1].consumed if newest else SequenceSet()
        # What the target has settled is no longer among the worker's own.
        committed = {*ring._protocol._committed, *range(ring._protocol._settled_below)}
        self.committed_early |= {row for row in committed if row not in durable}
        self.written.append(worker._progress.step - began_at)
        self._save_file(*arguments)


def test_training_goes_on_and_rows_are_committed_with_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker_of(tmp_path) as worker:
        disk = SlowDisk(worker, checkpoint.save_file)
        monkeypatch.setattr(checkpoint, "save_file", disk.save_file)
        worker.run()
    run = tmp_path / "run"
    assert disk.written[0] >= STEPS_A_WRITE  # the one of step 0 as well
    assert sum(steps >= STEPS_A_WRITE for steps in disk.written) >= 2
    assert not disk.committed_early
    steps = sorted(state_of(path)["step"] for path in run.glob("checkpoints/main/0/step-*"))
    assert steps[0] == 0
    assert len(steps) == len(disk.written)
    last = state_of(newest_of(run))
    assert last["step"] == steps[-1] == worker._progress.step
    account = account_of(run)
    assert account["rows_trained"] == account["rows_published"] == last["trained_rows"]
