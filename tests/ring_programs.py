"""Two programs for the fault tests: a ring's owner and a worker, each a real process.

Each appends what it does to `<name>.log`, one JSON object a line, before it goes on. A worker keeps
a checkpoint as a real one does: the rows in its weights and the consumed set, in one file. Either
can be told to hold at one point of a row's life, until `<name>.go` exists or a SIGTERM comes. Both
stop on SIGTERM as the services do, and end when the process that started them does.
"""

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config.shared import GroupTable
from common.contracts.control_messages import RingReport
from common.contracts.sequences import SequenceSet
from common.errors import RingdraftError
from common.lifecycle import stop_on_signals, write_atomically
from common.ring import segment
from common.ring.consumer import RingConsumer
from common.ring.lease import Lease
from common.ring.owner import RingOwner
from tests.forks import end_with_the_test
from tests.rings import endpoint_in, make_schema, make_table, write_row
from tests.row_bytes import FIELDS, is_content

# Points to hold at. An owner's: free, writing. A worker's: leased, copying, released,
# consumed, each of one row; saved, settled, drained.
OVER = "stream-is-over"


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
    hold_in: str = ""
    """The point to hold at."""
    hold_at: int = 0
    """The row to hold at: a sequence for the owner, how many were leased before for a worker."""
    group: str = "main"
    """Of a worker."""
    groups: dict[str, dict[str, Any]] = field(default_factory=lambda: {"main": {}})
    """Of an owner, with what their tables say."""
    endpoint: str = ""
    """A socket in the owner's place, where a worker is not to speak to it directly."""


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


def read_settled(folder: Path, groups: Iterable[str]) -> dict[str, SequenceSet]:
    """Return what the checkpoints of each group's workers hold together."""
    settled = {group: SequenceSet() for group in groups}
    for path in folder.glob("checkpoint-*.json"):
        group = json.loads(path.read_text())["group"]
        consumed = read_checkpoint(folder, path.stem.removeprefix("checkpoint-"))[1]
        settled[group] = settled[group].union(consumed)
    return settled


class Program:
    """What both programs have: a plan, a log, a stop event, a point to hold at."""

    def __init__(self, plan: Plan, stop: threading.Event) -> None:
        self.plan = plan
        self.folder = Path(plan.folder)
        self.log = Log(plan)
        self.stop = stop
        self._go = self.folder / f"{plan.name}.go"

    def pause(self, point: str, number: int | None = None, **values: Any) -> None:
        """Hold here if the plan says so."""
        here = self.plan.hold_in == point and number in (None, self.plan.hold_at)
        if not here or self._go.exists():
            return
        self.log.write("holding", point=point, **values)
        while not self._go.exists() and not self.stop.wait(0.01):
            pass


class LoggedAccount(Counter[str]):
    """A group's account in which a row that is given up is on disk before anybody hears of it."""

    def __init__(self, log: Log, group: str) -> None:
        super().__init__()
        self._log, self._group = log, group

    def __setitem__(self, account: str, count: int) -> None:
        if account in ("poison", "skipped"):
            self._log.write(account, group=self._group)
        super().__setitem__(account, count)


class Owner(Program):
    """Publishes every row that somebody lacks, again where one was lost, until all is committed."""

    def run(self) -> None:
        """Serve until the stream is drained or a stop is asked for."""
        self.log.write("reclaimed", num_bytes=segment.reclaim_dead_segments())
        groups = {name: GroupTable(**table) for name, table in self.plan.groups.items()}
        settled = read_settled(self.folder, groups)
        with RingOwner(
            endpoint=endpoint_in(self.folder),
            run="fault",
            schema=make_schema(),
            table=make_table(**self.plan.table),
            groups=groups,
            settled=settled,
        ) as owner:
            for group in groups:
                owner._protocol.book.accounts[group] = LoggedAccount(self.log, group)
            told = {group: known.model_dump(mode="json") for group, known in settled.items()}
            self.log.write("ready", settled=told)
            for sequence in self._rows_to_make(owner):
                self._make(owner, sequence)
            self._write_report(owner)
        if not self.stop.is_set():
            (self.folder / OVER).touch()

    def _rows_to_make(self, owner: RingOwner) -> Iterator[int]:
        """Yield sequences as a target server does: lost ones first, then fresh ones."""
        cursor, num_rows = 0, self.plan.num_rows
        while not self.stop.is_set() and not owner.is_drained():
            check_accounts(owner.report())
            sequence = owner.next_recapture()
            while sequence is None and cursor < num_rows:
                sequence = cursor if owner.wants(cursor) else None
                cursor += 1
            if sequence is not None:
                yield sequence
                self.stop.wait(self.plan.row_seconds)
                continue
            owner.end(num_rows - 1)
            self.log.write("ended")
            self.stop.wait(0.02)

    def _make(self, owner: RingOwner, sequence: int) -> None:
        self.log.write("publishing", sequence=sequence)
        self.pause("free", sequence)
        slot = None
        while slot is None and not self.stop.is_set():
            slot = owner.loan(0.2)
        if slot is not None:
            write_row(
                slot, owner.layout, sequence, half_way=lambda: self.pause("writing", sequence)
            )
            self.log.write("published", sequence=sequence, slot=slot.slot)

    def _write_report(self, owner: RingOwner) -> None:
        report = owner.report()
        check_accounts(report)
        event = "stopped" if self.stop.is_set() else "done"
        self.log.write(event, report=report.model_dump(mode="json"))


def check_accounts(report: RingReport) -> None:
    """Every row that was published is in exactly one account (R6)."""
    for account in report.groups:
        ended = account.released + account.poison + account.skipped
        assert account.published == ended + account.in_ring, account


class Trainer(Program):
    """Trains on rows one by one; the weights are the list of rows they have seen."""

    def __init__(self, plan: Plan, stop: threading.Event) -> None:
        super().__init__(plan, stop)
        self._trained, consumed = read_checkpoint(self.folder, plan.name)
        self._saved = len(self._trained)
        self._num_leased = 0
        self._consumer = RingConsumer(
            endpoint=Path(plan.endpoint or endpoint_in(self.folder)), worker_id=plan.name,
            group=plan.group, capacity=plan.capacity, consumed=consumed,
        )  # fmt: skip

    def run(self) -> None:
        """Train until the stream is drained or a stop is asked for."""
        with contextlib.closing(self._consumer):  # a goodbye is out, however it ends
            self._train()
        self.log.write("stopped" if self.stop.is_set() else "done")

    def _train(self) -> None:
        self.log.write("started", consumed=self._consumer.consumed.model_dump(mode="json"))
        while not self.stop.is_set() and not self._is_over():
            lease = self._consumer.acquire(0.05)
            if lease is not None:
                self._train_on(lease)
                self._num_leased += 1
            is_settled = lease is None and self._consumer.is_settled
            if is_settled:
                self.pause("settled")
            if is_settled or len(self._trained) - self._saved >= self.plan.commit_every:
                self._save()
        self.pause("drained")
        self._save()

    def _is_over(self) -> bool:
        """Whether all is committed; an owner that has ended says so in the run's folder."""
        return self._consumer.is_drained or (self.folder / OVER).exists()

    def _train_on(self, lease: Lease) -> None:
        told, number = lease.descriptor, self._num_leased
        sequence = told.sequence
        self.log.write(
            "leased", sequence=sequence,
            delivery=(told.ring_epoch, told.lease.slot, told.lease.generation, told.attempt),
        )  # fmt: skip
        self.pause("leased", number, sequence=sequence)
        copies = {}
        for name in FIELDS:
            copies[name] = lease.read(name)
            if name == FIELDS[0]:
                self.pause("copying", number, sequence=sequence)
        if self.stop.is_set():
            lease.nack("stopping")
            return
        if not lease.is_intact(copies["token_ids"]):
            self.log.write("torn", sequence=sequence)
            lease.nack("torn")
            return
        assert is_content(sequence, copies), f"row {sequence}: bytes of another row"
        is_kept = lease.release()
        self.pause("released", number)
        if (
            is_kept and not self.stop.is_set()
        ):  # else: staged and never trained, it has to come again
            self._step(sequence, number)

    def _step(self, sequence: int, number: int) -> None:
        time.sleep(self.plan.row_seconds)
        self._trained.append(sequence)
        self.log.write("trained", sequence=sequence)
        self._consumer.mark_consumed({sequence})
        self._consumer.return_buffer()
        self.pause("consumed", number)

    def _save(self) -> None:
        if self._saved < len(self._trained):
            consumed = self._consumer.consumed.model_dump(mode="json")
            state = {"group": self.plan.group, "trained": self._trained, "consumed": consumed}
            path = self.folder / f"checkpoint-{self.plan.name}.json"
            write_atomically(path, json.dumps(state))
            self._saved = len(self._trained)
            self.log.write("saved", trained=self._trained)
            self.pause("saved")
        self._consumer.mark_committed()


def run_program(kind: str, plan: Plan) -> None:
    """Be one of the programs, in a process of its own; errors go to `<name>.err`."""
    errors = Path(plan.folder) / f"{plan.name}.err"
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    end_with_the_test()
    segment.SEGMENT_DIRECTORY = Path(plan.shared_memory)
    program = {"owner": Owner, "worker": Trainer}[kind]
    try:
        program(plan, stop_on_signals()).run()
    except RingdraftError as error:
        Log(plan).write("failed", error=f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)  # at once: a goodbye must be out
