"""Position in the stream, checkpoints and claims of the drafter worker."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from common.config.loading import load
from common.contracts.sequences import SequenceSet
from common.errors import ConfigError, DiskFullError
from common.telemetry.late import LateService
from services.drafter_worker.checkpoint import CheckpointStore, TrainerState, read_trainer
from services.drafter_worker.claim import claim_index
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.schedule import StreamPosition


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("captured", ["true", "false"])
def test_the_switches_of_the_step_are_independent(compiled: str, captured: str) -> None:
    settings = [
        "run.device=cuda", "target.model=m", f"drafter.compile={compiled}",
        f"drafter.cuda_graphs={captured}",
    ]  # fmt: skip
    drafter = load(WorkerConfig, [], settings, {}).drafter
    assert (drafter.compile, drafter.cuda_graphs) == (compiled == "true", captured == "true")


def test_a_worker_that_does_not_run_yet_says_what_it_waits_for() -> None:
    late = LateService()
    late.enter("compiling", "waits for worker main-0")
    state = late.describe()
    assert (state.phase, state.detail) == ("compiling", "waits for worker main-0")


def test_the_stream_s_position_is_that_of_all_rings_and_never_falls_back() -> None:
    position = StreamPosition(2, SequenceSet())
    seen = []
    for sequence in (0, 2, 4, 1, 2, 6, 3):  # ring 0 is ahead of ring 1, and row 2 comes again
        position.reach(sequence)
        seen.append(position.num_rows)
    assert seen == [1, 2, 3, 4, 4, 5, 6]


def test_a_single_ring_s_position_is_its_furthest_row() -> None:
    position = StreamPosition(1, SequenceSet())
    position.reach(41)
    assert position.num_rows == 42


def test_a_resumed_worker_s_position_is_that_of_its_checkpoint() -> None:
    position = StreamPosition(2, SequenceSet(low=3, above=(4, 6, 8)))
    assert position.num_rows == 5 + 1
    position.reach(3)
    assert position.num_rows == 7


def save(store: CheckpointStore, step: int) -> Path:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")

    return store.save(write, {"0.master": torch.ones(2)}, state_at(step), {"run": "x"})


def state_at(step: int) -> TrainerState:
    return TrainerState(step=step, trained_rows=step, trained_tokens=0, consumed=SequenceSet())


def test_checkpoints_keep_the_first_and_the_newest_across_restarts(tmp_path: Path) -> None:
    for start in (0, 3, 6):
        store = CheckpointStore(tmp_path, keep=2)
        for step in range(start, start + 3):
            save(store, step)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000000", "step-000007", "step-000008"]
    tensors, state = read_trainer(tmp_path / "step-000008")
    assert state == state_at(8)
    assert torch.equal(tensors["0.master"], torch.ones(2))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_checkpoint_that_fails_leaves_the_older_ones_and_nothing_of_itself(
    tmp_path: Path, error: Exception
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)

    def full(_directory: Path) -> None:
        raise error

    with pytest.raises(DiskFullError, match="disk is full"):
        store.save(full, {}, state_at(2), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_half_written_checkpoint_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step-000004" / "trainer").mkdir(parents=True)
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    assert not list(tmp_path.iterdir())


def test_workers_claim_distinct_indexes_and_a_freed_one_is_taken_again(tmp_path: Path) -> None:
    first, first_lock = claim_index(tmp_path, "a")
    second, second_lock = claim_index(tmp_path, "b")
    assert (first, second) == (0, 1)
    first_lock.release()
    third, third_lock = claim_index(tmp_path, "c")
    assert third == 0
    holder = json.loads((tmp_path / "1" / "owner.lock").read_text())
    assert holder == {"pid": os.getpid(), "holder": "b"}
    for lock in (second_lock, third_lock):
        lock.release()


def test_a_claim_where_nothing_can_be_written_is_an_error_and_no_endless_search(
    tmp_path: Path,
) -> None:
    (tmp_path / "main").write_text("a file")
    with pytest.raises(ConfigError, match=r"choose a run\.directory"):
        claim_index(tmp_path / "main", "a worker")


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (0, 999_999, 1_000_000, 1_000_001):
        newest = save(store, step)
    assert store.newest() == newest
    assert (tmp_path / "step-1000000").exists()
