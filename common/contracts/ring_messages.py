"""Messages between a ring's owner (target server) and its consumers (drafter workers).

The owner's ROUTER binds `target-<i>.sock`; each worker has one DEALER a ring. A descriptor grants
the lease it names, and every record repeats what it takes to act on it alone, so that a lost,
duplicated or reordered message heals itself (rules R2 to R8). A sequence in these messages is the
row's number in its ring (see `Shard`).

`capacity` is absolute: staging buffers that are free or under a lease, 0 until the worker has
attached the segment that its Welcome names. What the owner may send is `capacity` less the leases
it has on record for the session (R4). `number` rises with each message of a session but its Bye; of
two capacities the one with the higher number counts.

    worker -> owner   Hello  Heartbeat  Credit  Release  Nack  Bye
    owner -> worker   Welcome  Descriptor  Pulse  Refused
"""

from typing import Annotated, Literal

from pydantic import Field

from common.contracts.codec import Decoder
from common.contracts.record import Record
from common.contracts.rows import RowSchema, Split
from common.contracts.sequences import Sequence, SequenceSet, Shard

U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.001, le=86_400.0)]
"""An interval: what a poll can wait for, and not so short that it is none."""
NackReason = Literal["torn", "corrupt", "stopping"]
RefusalKind = Literal[
    "unknown_session", "unknown_group", "other_shard", "ended_session", "replaced"
]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class LeaseRef(Record):
    """Names one lease: acts only if all of it matches the slot's current lease (R2)."""

    slot: Count
    generation: Count
    lease_id: Count


class SegmentRef(Record):
    """Where the slots of a ring are."""

    backing: Literal["host", "cuda_ipc", "memory"]
    name: Name
    num_bytes: Annotated[int, Field(ge=1)]
    num_slots: Annotated[int, Field(ge=1)]
    owner_pid: Count
    gpu_uuid: str = ""
    handle: bytes = b""


class Hello(Record):
    """A worker's session begins, or begins again after a ring_epoch ended."""

    worker_id: Name
    session: U64
    number: Count
    group: Name
    shard: Shard
    """Which rows of the run the worker takes this ring's to be."""
    capacity: Count
    pid: Count
    consumed: SequenceSet
    committed: SequenceSet
    staged: SequenceSet
    """Released into a staging buffer and not consumed yet: rows that need not come again (R8)."""


class Heartbeat(Record):
    """What a session holds and has done, absolute, with a rising number."""

    ring_epoch: U64
    session: U64
    number: Count
    capacity: Count
    held: tuple[LeaseRef, ...]
    consumed: SequenceSet
    committed: SequenceSet


class Credit(Record):
    """A staging buffer is free again where the owner knew of none; a heartbeat repeats it."""

    ring_epoch: U64
    session: U64
    number: Count
    capacity: Count


class Release(Record):
    """The copy is done and the slot may be reused; the row is not consumed by this (R8)."""

    ring_epoch: U64
    session: U64
    number: Count
    capacity: Count
    lease: LeaseRef


class Nack(Record):
    """The lease ends without a copy; the row goes back to READY."""

    ring_epoch: U64
    session: U64
    number: Count
    capacity: Count
    lease: LeaseRef
    reason: NackReason


class Bye(Record):
    """The session ends on purpose, after its last commit."""

    ring_epoch: U64
    session: U64
    committed: SequenceSet
    is_finished: bool
    """The worker trains no more, at its last step or with weights that are none: no successor comes
    for the rows that are left."""


class Welcome(Record):
    """Answer to Hello: where the slots are and how rows look."""

    ring_epoch: U64
    session: U64
    segment: SegmentRef
    row_schema: RowSchema
    total_rows: Count | None
    """Rows of the whole stream where the data has been counted: schedules follow it."""
    heartbeat_seconds: Seconds
    lease_seconds: Seconds


class Descriptor(Record):
    """A published row; sending it grants the lease it names."""

    ring_epoch: U64
    session: U64
    lease: LeaseRef
    sequence: Sequence
    split: Split
    attempt: Count
    used_tokens: Count
    num_bytes: Count
    token_hash: U64


class Pulse(Record):
    """Answer to every heartbeat: the stream's state, repeated (R7)."""

    ring_epoch: U64
    session: U64
    number: Count
    settled_below: Sequence
    """Every sequence under this one is committed, skipped or poison in the worker's group."""
    last_sequence: Annotated[int, Field(ge=-1, lt=1 << 64)] | None
    """Set once the stream has ended: the ring's last sequence, -1 where it carries no row."""
    is_settled: bool
    """Nothing of the group can return unless a session dies: time to commit (R7)."""
    is_drained: bool
    """Every row of the group is released, skipped or poison, and committed (R7, R8)."""


class Refused(Record):
    """The owner does not serve this session, and why.

    `replaced`: another process has begun a session under the same worker_id; this one must stop.
    """

    ring_epoch: U64
    session: U64
    kind: RefusalKind
    reason: str


OWNER_DECODER = Decoder(Hello, Heartbeat, Credit, Release, Nack, Bye)
WORKER_DECODER = Decoder(Welcome, Descriptor, Pulse, Refused)
