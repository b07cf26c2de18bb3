"""Many rows through few slots, every byte compared: no copy that passes is another row's."""

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ring.backings import BACKINGS
from common.ring.owner import RingOwner
from tests.ring_hammer import Blow, hammer
from tests.ring_programs import check_accounts
from tests.ring_scene import END_SECONDS, FORKS
from tests.rings import make_groups, make_schema, make_table, nothing, wait_until, write_row

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PLACES = ["host", pytest.param("cuda_ipc", marks=NEEDS_GPU)]
MANY = [2_000, pytest.param(20_000, marks=[pytest.mark.hammer, pytest.mark.timeout(900)])]


@contextlib.contextmanager
def hammered(backing: str, num_rows: int, **options: Any) -> Iterator[tuple[RingOwner, Counter]]:
    """Send rows through a ring to two worker processes; yield its owner and what they found."""
    table = options.pop("table", {})
    gpu = 0 if backing == "cuda_ipc" else None
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        endpoint, results = Path(folder) / "target-0.sock", Path(folder)
        with RingOwner(
            endpoint=endpoint, run=f"hammer-{os.getpid()}", schema=make_schema(),
            table=make_table(max_attempts=10_000, **table), groups=make_groups(),
            backing=BACKINGS[backing], gpu=gpu,
        ) as owner:  # fmt: skip
            blows = [
                Blow(str(endpoint), name, str(results / name), gpu=gpu, seed=seed, **options)
                for seed, name in enumerate(("one", "two"))
            ]
            found: Counter[str] = Counter()
            with processes(blows) as workers:
                pids = [worker.pid for worker in workers] if options.get("dwells") else []
                with interrupted(pids):
                    feed(owner, num_rows, slow if pids else nothing)
                    for worker in workers:
                        worker.join(END_SECONDS)
                        assert worker.exitcode == 0
            for blow in blows:
                found.update(json.loads(Path(blow.results).read_text()))
            yield owner, found


@contextlib.contextmanager
def processes(blows: list[Blow]) -> Iterator[list[BaseProcess]]:
    """Start a worker for each blow; none of them outlives the test."""
    workers = [FORKS.Process(target=hammer, args=(blow,)) for blow in blows]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.join(END_SECONDS)


@contextlib.contextmanager
def interrupted(pids: list[int | None]) -> Iterator[None]:
    """Stop each of the processes again and again, at random moments, for longer than a lease."""
    done, chance = threading.Event(), random.Random(3)

    def interrupt() -> None:
        while pids and not done.wait(chance.uniform(0.05, 0.2)):
            pid = chance.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                done.wait(0.25)
                os.kill(pid, signal.SIGCONT)

    rascal = threading.Thread(target=interrupt, daemon=True)
    rascal.start()
    try:
        yield
    finally:
        done.set()
        rascal.join()


def slow() -> None:
    """Leave a row half written for a while: a reader's check has to meet such a slot."""
    time.sleep(0.002)


def feed(owner: RingOwner, num_rows: int, half_way: Callable[[], None]) -> None:
    """Publish every row, and those again that get lost, until all is committed."""
    cursor = 0
    while not owner.is_drained():
        sequence = owner.next_recapture()
        if sequence is None and cursor < num_rows:
            sequence, cursor = cursor, cursor + 1
        if sequence is None:
            owner.end(num_rows - 1)
            threading.Event().wait(0.01)
        elif owner.wants(sequence):
            slot = owner.loan(END_SECONDS)
            assert slot is not None, "the ring stayed full"
            write_row(slot, owner.layout, sequence, half_way)


@pytest.mark.parametrize("num_rows", MANY)
@pytest.mark.parametrize("backing", PLACES)
def test_every_byte_of_every_row_arrives_as_it_was_written(backing: str, num_rows: int) -> None:
    patient = {"lease_seconds": 60.0, "lease_max_seconds": 60.0, "session_timeout_seconds": 60.0}
    with hammered(backing, num_rows, table=patient) as (owner, found):
        assert found == Counter({"intact, right": num_rows})
        (account,) = owner.report().groups
        assert (account.published, account.released, account.requeued) == (num_rows, num_rows, 0)
        wait_until(lambda: owner.settled_below() == num_rows, "all rows are committed")


@pytest.mark.parametrize("num_rows", MANY)
@pytest.mark.parametrize("backing", PLACES)
def test_every_copy_that_was_torn_by_a_writer_is_found_torn(backing: str, num_rows: int) -> None:
    """Leases end early, readers dwell and are stopped in their copies, slots are written again."""
    hasty = {
        "num_slots": 3, "heartbeat_seconds": 0.02, "lease_seconds": 0.05,
        "lease_max_seconds": 0.08, "session_timeout_seconds": 2.0,
    }  # fmt: skip
    with hammered(
        backing, num_rows, table=hasty, dwells=30 / num_rows, longest_dwell_seconds=0.4
    ) as (owner, found):  # fmt: skip
        print(num_rows, dict(found), owner.report().reclaimed)
        assert found["intact, wrong"] == 0
        assert found["torn, wrong"] >= 5
        assert found["intact, right"] >= num_rows
        check_accounts(owner.report())
        (account,) = owner.report().groups
        assert account.open == account.in_ring == account.poison == 0
        assert account.committed == num_rows
