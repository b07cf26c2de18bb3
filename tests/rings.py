"""Small rings for tests: rows, readers that a test leads, an owner whose clock the test turns."""

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from common.config.shared import GroupTable, RingTable
from common.contracts.record import Record
from common.contracts.ring_messages import (
    Bye,
    Descriptor,
    Heartbeat,
    Hello,
    LeaseRef,
    Nack,
    NackReason,
    Release,
    SegmentRef,
)
from common.contracts.rows import DocumentSpan, RowSchema
from common.contracts.sequences import ONE_RING, SequenceSet
from common.ring.book import PublishedRow
from common.ring.consumer import RingConsumer
from common.ring.layout import PAGE_BYTES, SlotLayout, unpack_documents
from common.ring.lease import Lease
from common.ring.owner import RingOwner
from common.ring.protocol import OwnerProtocol
from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX
from common.ring.writable import WritableSlot
from tests.row_bytes import FIELDS, content, is_content

EPOCH = 0xE70C
WATCHDOG_SECONDS = 60.0
RecordT = TypeVar("RecordT", bound=Record)


def make_schema(**changes: object) -> RowSchema:
    """Return the schema of tiny rows."""
    values: dict = {
        "row_tokens": 128,
        "max_documents": 4,
        "hidden_size": 8,
        "target_layer_ids": (1, 2),
        "aux_dtype": "bfloat16",
        "has_last_hidden_states_normed": False,
        "target_fingerprint": "target",
        "template_fingerprint": "template",
        "feature_engine": "test",
    }
    return RowSchema(**{**values, **changes})


def make_table(**changes: object) -> RingTable:
    """Return quick timings."""
    values: dict = {
        "num_slots": 4,
        "capacity": 2,
        "heartbeat_seconds": 0.05,
        "session_timeout_seconds": 1.0,
        "lease_seconds": 0.5,
        "lease_max_seconds": 1.5,
        "resume_wait_seconds": 0.2,
    }
    return RingTable(**{**values, **changes})


def make_groups(*names: str, **changes: object) -> dict[str, GroupTable]:
    """Return groups by name."""
    return {name: GroupTable(**changes) for name in names or ("main",)}


def nothing() -> None:
    """Do nothing."""


def publish(owner: RingOwner, sequence: int, timeout: float = 10.0) -> None:
    """Write and publish one row, every field of it."""
    slot = owner.loan(timeout)
    assert slot is not None, "the ring stayed full"
    write_row(slot, owner.layout, sequence)


def write_row(
    slot: WritableSlot, layout: SlotLayout, sequence: int, half_way: Callable[[], None] = nothing
) -> None:
    """Fill a slot and publish it; `half_way` is called before the last of its fields."""
    with slot:
        for name in FIELDS:
            if name == FIELDS[-1]:
                half_way()
            slot.write(name, content(sequence, name, layout.fields[name].num_bytes))
        documents = documents_of(sequence)
        slot.publish(sequence=sequence, split="train", used_tokens=100, documents=documents)


def documents_of(sequence: int) -> tuple[DocumentSpan, ...]:
    """Return the documents of a row."""
    return (DocumentSpan(sample_id=sequence, tag=sequence % 7, start=0, length=100),)


def endpoint_in(directory: Path) -> Path:
    """Return a socket path short enough for the kernel."""
    return directory / "target-0.sock"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nothing is bound to at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def segments_of(run: str) -> list[str]:
    """Return the names of a run's segments in /dev/shm."""
    return sorted(path.name for path in SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}{run}-*"))


def wait_until(holds: Callable[[], bool], what: str, timeout: float = WATCHDOG_SECONDS) -> None:
    """Wait for something that must come to be; the watchdog is far beyond what it takes.

    It looks less often as time goes by: a look may be a request, and what is waited for needs the
    core.
    """
    began_at = time.monotonic()
    while not holds():
        waited = time.monotonic() - began_at
        assert waited < timeout, f"not within {timeout} s: {what}"
        time.sleep(min(0.005 + waited / 20, 0.1))


class Reader:
    """A consumer that a test leads by the hand: each step of a worker is a call."""

    def __init__(self, endpoint: Path, worker_id: str, group: str = "main", capacity: int = 2,
                 consumed: SequenceSet | None = None, gpu: int | None = None) -> None:  # fmt: skip
        self._consumer = RingConsumer(
            endpoint=endpoint,
            worker_id=worker_id,
            group=group,
            capacity=capacity,
            consumed=consumed,
            gpu=gpu,
        )
        self._leases: dict[int, Lease] = {}

    def take(self, timeout: float = WATCHDOG_SECONDS) -> int | None:
        """Acquire a lease and return its sequence."""
        lease = self._consumer.acquire(timeout)
        if lease is None:
            return None
        self._leases[lease.descriptor.sequence] = lease
        return lease.descriptor.sequence

    def descriptor(self, sequence: int) -> Descriptor:
        return self._leases[sequence].descriptor

    def documents(self, sequence: int) -> tuple[DocumentSpan, ...]:
        lease = self._leases[sequence]
        return unpack_documents(lease.read("documents"), lease.header().num_documents)

    def copy(self, sequence: int, name: str = "token_ids") -> bytes:
        return self._leases[sequence].read(name)

    def is_intact(self, sequence: int, token_ids: bytes) -> bool:
        return self._leases[sequence].is_intact(token_ids)

    def is_payload_intact(self, sequence: int) -> bool:
        return self._leases[sequence].is_payload_intact()

    def release(self, sequence: int) -> bool:
        return self._leases[sequence].release()

    def nack(self, sequence: int, reason: NackReason = "corrupt") -> None:
        self._leases[sequence].nack(reason)

    def train(self, sequence: int) -> None:
        """Use a released row in a step, and free its buffer."""
        self._consumer.mark_consumed({sequence})
        self._consumer.return_buffer()

    def commit(self) -> None:
        self._consumer.mark_committed()

    def state(self) -> tuple[bool, bool, SequenceSet]:
        """Return whether the stream is settled, whether it is drained, and what is consumed."""
        return self._consumer.is_settled, self._consumer.is_drained, self._consumer.consumed

    def has_ring(self) -> bool:
        return self._consumer.backing is not None

    def next_row(self, timeout: float = WATCHDOG_SECONDS) -> int | None:
        """Go all the way with one row, if one comes: copy, check, release, train."""
        sequence = self.take(timeout)
        if sequence is None:
            return None
        copies = {name: self.copy(sequence, name) for name in FIELDS}
        documents = self.documents(sequence)
        assert self.is_intact(sequence, copies["token_ids"])
        assert is_content(sequence, copies)
        assert documents == documents_of(sequence)
        self.release(sequence)
        self.train(sequence)
        return sequence

    def close(self) -> None:
        self._leases.clear()
        self._consumer.close()


def serve_readers(line: Connection) -> None:
    """Make readers and call them as another process asks, until it says None."""
    readers: dict[int, Reader] = {}
    while (call := line.recv()) is not None:
        key, name, arguments, named = call
        try:
            if name == "open":
                readers[key] = Reader(*arguments, **named)
                line.send(None)
            else:
                line.send(getattr(readers[key], name)(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - raised again where the call was made
            line.send(error)


class RemoteReader:
    """The calls of a `Reader` that lives in another process."""

    def __init__(self, line: Connection, *arguments: Any, **named: Any) -> None:
        self._line = line
        self._call("open", *arguments, **named)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._line.send((id(self), name, arguments, named))
        assert self._line.poll(WATCHDOG_SECONDS), f"the other process does not answer {name}"
        answer = self._line.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def make_segment(num_slots: int) -> SegmentRef:
    """Return a segment with room for `row`s, which is not there."""
    return SegmentRef(
        backing="memory", name="s", num_bytes=num_slots * 2 * PAGE_BYTES, num_slots=num_slots,
        owner_pid=1,
    )  # fmt: skip


def row(sequence: int) -> PublishedRow:
    """Return what a descriptor says of a row."""
    return PublishedRow(sequence, "train", 100, PAGE_BYTES, 7)


def sequences(*members: int, low: int = 0) -> SequenceSet:
    """Return a set of sequences."""
    return SequenceSet.of(members, low=low)


def first_numbers() -> Iterator[int]:
    """Count messages."""
    number = 0
    while True:
        number += 1
        yield number


class Worker:
    """One session as an owner hears it: says what the test tells it to, numbers its messages."""

    def __init__(self, bench: "Bench", worker_id: str, session: int, group: str) -> None:
        self.bench, self.worker_id, self.session, self.group = bench, worker_id, session, group
        self.identity = f"{worker_id}/{session:016x}".encode()
        self._numbers = first_numbers()

    def say(self, kind: type[Record], **fields: Any) -> None:
        """Send a record made of this session's values and of `fields`."""
        defaults = {
            "ring_epoch": EPOCH, "session": self.session, "capacity": 2, "held": (), "pid": 1,
            "worker_id": self.worker_id, "group": self.group, "consumed": SequenceSet(),
            "committed": SequenceSet(), "staged": SequenceSet(), "reason": "corrupt",
            "shard": ONE_RING, "is_finished": False,
            **fields,
        }  # fmt: skip
        if "number" in kind.model_fields and "number" not in defaults:
            defaults["number"] = next(self._numbers)
        named = {name: defaults[name] for name in kind.model_fields}
        identity = fields.get("identity", self.identity)
        self.bench.owner.receive(identity, kind(**named), self.bench.now)

    def hello(self, **fields: Any) -> "Worker":
        self.say(Hello, **fields)
        return self

    def beat(self, *held: LeaseRef, **fields: Any) -> None:
        self.say(Heartbeat, held=held, **fields)

    def release(self, lease: LeaseRef, **fields: Any) -> None:
        self.say(Release, lease=lease, **fields)

    def nack(self, lease: LeaseRef, **fields: Any) -> None:
        self.say(Nack, lease=lease, **fields)

    def bye(self, **fields: Any) -> None:
        self.say(Bye, **fields)

    def told(self, kind: type[RecordT]) -> list[RecordT]:
        """Take what the owner has sent to this session since the last call, of one kind."""
        mine = [r for i, r in self.bench.owner.outbox if i == self.identity and type(r) is kind]
        self.bench.owner.outbox = [
            (i, r) for i, r in self.bench.owner.outbox if i != self.identity or type(r) is not kind
        ]
        return mine

    def leases(self) -> list[LeaseRef]:
        """Take the leases that were granted or sent again since the last call."""
        return [told.lease for told in self.told(Descriptor)]


class Bench:
    """An owner's protocol without sockets or memory, and a clock that the test turns."""

    def __init__(
        self,
        num_slots: int = 4,
        groups: dict[str, GroupTable] | None = None,
        settled: dict[str, SequenceSet] | None = None,
        **table: object,
    ) -> None:
        self.now = 1000.0
        self.table = make_table(num_slots=num_slots, **table)
        self.owner = OwnerProtocol(
            EPOCH, make_segment(num_slots), make_schema(), table=self.table, groups=groups or make_groups(),
            settled=settled,
        )  # fmt: skip
        self._next_session = 100

    def worker(self, worker_id: str = "w", group: str = "main", **fields: Any) -> Worker:
        """Begin a session of a worker."""
        self._next_session += 1
        return Worker(self, worker_id, self._next_session, group).hello(**fields)

    def publish(self, *numbers: int) -> None:
        """Publish rows."""
        for sequence in numbers:
            slot = self.owner.book.loan()
            assert slot is not None, "the ring is full"
            self.owner.publish(slot, row(sequence), self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, in ticks."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.1)
            self.owner.tick(self.now)

    def accounts(self, group: str = "main") -> dict[str, int]:
        """Return a group's accounts, checked for their identity (R6)."""
        counts = self.owner.book.accounts[group]
        ended = counts["released"] + counts["poison"] + counts["skipped"]
        assert counts["published"] == ended + self.owner.book.in_ring(group)
        return counts

    def recaptures(self) -> list[int]:
        """Take every sequence that is to be captured again."""
        taken = []
        while (sequence := self.owner.next_recapture()) is not None:
            taken.append(sequence)
        return taken
