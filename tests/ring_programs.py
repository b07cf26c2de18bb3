"""Two programs for the fault tests: a ring's owner and a worker, each a real process.

    python -m tests.ring_programs owner|worker '<JSON of the plan>'

Each appends what it does to `<name>.log`, one JSON object a line, before it goes on. A worker keeps
a checkpoint as a real one does: the rows in its weights and the consumed set, in one file. Both end
when their standard input does, so that no test leaves a process behind.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.contracts.sequences import SequenceSet
from common.errors import RingdraftError
from common.lifecycle import write_atomically
from common.ring import segment
from common.ring.consumer import RingConsumer
from common.ring.lease import Lease
from common.ring.owner import RingOwner
from tests.rings import endpoint_in, make_groups, make_schema, make_table, pattern, publish


@dataclass(frozen=True)
class Plan:
    """What a process is to do."""

    folder: str
    shared_memory: str
    """A folder in /dev/shm: what one test leaves dead, another run's start must not reclaim."""
    name: str
    num_rows: int = 24
    row_seconds: float = 0.0
    """An owner makes, or a worker trains, a row in this time."""
    table: dict[str, Any] = field(default_factory=dict)
    capacity: int = 2
    commit_every: int = 4
    hold_at: int = -1
    """The worker's copy of this many-th row takes until `<name>.go` exists; so does the owner's
    writing of the row of this number."""


class Log:
    """What a process has done, on disk before it goes on."""

    def __init__(self, plan: Plan) -> None:
        self._descriptor = os.open(
            Path(plan.folder) / f"{plan.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), **values})
        os.write(self._descriptor, line.encode() + b"\n")


def read_log(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what a process has written down."""
    path = folder / f"{name}.log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_checkpoint(folder: Path, name: str) -> tuple[list[int], SequenceSet]:
    """Return the rows in a worker's durable weights, and the set that its checkpoint lists."""
    path = folder / f"checkpoint-{name}.json"
    if not path.exists():
        return [], SequenceSet()
    state = json.loads(path.read_text())
    return state["trained"], SequenceSet.model_validate_json(json.dumps(state["consumed"]))


def run_owner(plan: Plan) -> None:
    """Publish every row that somebody lacks, again where one was lost, until all is committed."""
    log, folder = Log(plan), Path(plan.folder)
    log.write("reclaimed", num_bytes=segment.reclaim_dead_segments())
    settled = SequenceSet()
    for path in folder.glob("checkpoint-*.json"):
        settled = settled.union(read_checkpoint(folder, path.stem.removeprefix("checkpoint-"))[1])
    with RingOwner(
        endpoint=endpoint_in(folder),
        run="fault",
        schema=make_schema(),
        table=make_table(**plan.table),
        groups=make_groups(),
        settled={"main": settled},
    ) as owner:
        log.write("ready", settled=settled.model_dump(mode="json"))
        for sequence in rows_to_make(owner, plan):
            log.write("publishing", sequence=sequence)
            if sequence == plan.hold_at:
                write_half(owner, sequence, log)
                wait_for_go(plan)
            publish(owner, sequence, timeout=100.0)
        log.write("done", report=owner.report().model_dump(mode="json"))


def write_half(owner: RingOwner, sequence: int, log: Log) -> None:
    """Begin to write a row and leave it at that."""
    writable = owner.loan(100.0)
    assert writable is not None
    view = writable.field("token_ids")
    half = len(view) // 2
    view[:half] = pattern(sequence) * half
    log.write("writing", sequence=sequence, slot=writable.slot)


def wait_for_go(plan: Plan) -> None:
    """Wait until the test says go."""
    while not (Path(plan.folder) / f"{plan.name}.go").exists():
        time.sleep(0.01)


def rows_to_make(owner: RingOwner, plan: Plan) -> Iterator[int]:
    """Yield sequences as a target server does: lost ones first, then fresh ones that are wanted."""
    cursor = 0
    while not owner.is_drained():
        sequence = owner.next_recapture()
        while sequence is None and cursor < plan.num_rows:
            sequence = cursor if owner.wants(cursor) else None
            cursor += 1
        if sequence is not None:
            yield sequence
            time.sleep(plan.row_seconds)
        else:
            owner.end(plan.num_rows - 1)
            time.sleep(0.02)


class Trainer:
    """Trains on rows one by one; the weights are the list of rows they have seen."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder = Path(plan.folder)
        self._log = Log(plan)
        self._trained, consumed = read_checkpoint(self._folder, plan.name)
        self._saved = len(self._trained)
        self._num_copied = 0
        self._consumer = RingConsumer(
            endpoint=endpoint_in(self._folder), worker_id=plan.name, group="main",
            capacity=plan.capacity, consumed=consumed,
        )  # fmt: skip

    def run(self) -> None:
        """Train until the stream is drained."""
        self._log.write("started", consumed=self._consumer.consumed.model_dump(mode="json"))
        while not self._consumer.is_drained:
            lease = self._consumer.acquire(0.05)
            if lease is not None:
                self._train_on(lease)
            if len(self._trained) - self._saved >= self._plan.commit_every or (
                lease is None and self._consumer.is_settled
            ):
                self._save()
        self._consumer.close()
        self._log.write("done")

    def _train_on(self, lease: Lease) -> None:
        sequence = lease.descriptor.sequence
        copied = lease.read("token_ids")
        if self._num_copied == self._plan.hold_at:
            self._hold(sequence)
        self._num_copied += 1
        if not lease.is_intact(copied):
            self._log.write("torn", sequence=sequence)
            lease.nack("torn")
            return
        assert set(copied) == set(pattern(sequence)), sequence
        lease.release()
        time.sleep(self._plan.row_seconds)
        self._trained.append(sequence)
        self._log.write("trained", sequence=sequence)
        self._consumer.mark_consumed({sequence})
        self._consumer.return_buffer()

    def _hold(self, sequence: int) -> None:
        self._log.write("holding", sequence=sequence)
        wait_for_go(self._plan)

    def _save(self) -> None:
        if self._saved < len(self._trained):
            consumed = self._consumer.consumed.model_dump(mode="json")
            state = json.dumps({"trained": self._trained, "consumed": consumed})
            write_atomically(self._folder / f"checkpoint-{self._plan.name}.json", state)
            self._saved = len(self._trained)
            self._log.write("saved", trained=self._trained)
        self._consumer.mark_committed()


def die_with_the_test() -> None:
    """End this process when the test that started it is gone."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def main(kind: str, plan: Plan) -> int:
    """Run one of the programs; return its exit code."""
    die_with_the_test()
    segment.SEGMENT_DIRECTORY = Path(plan.shared_memory)
    try:
        if kind == "owner":
            run_owner(plan)
        else:
            Trainer(plan).run()
    except RingdraftError as error:
        Log(plan).write("failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def arguments(kind: str, plan: Plan) -> list[str]:
    """Return the command line of a program."""
    return [sys.executable, "-m", "tests.ring_programs", kind, json.dumps(asdict(plan))]


if __name__ == "__main__":
    os._exit(main(sys.argv[1], Plan(**json.loads(sys.argv[2]))))  # at once: a goodbye must be out
