"""A worker's side of the protocol: what it holds and has done, and the messages that say so. No I/O.

Rules R2 to R5 and R8 from the other end; `protocol.py` is the owner's. What a session holds is void
when the session ends; what the worker has trained, or holds in a staging buffer, goes on.
"""

import logging
import os
import secrets
from collections import OrderedDict, deque

from common.contracts.record import Record
from common.contracts.ring_messages import (
    Bye,
    Credit,
    Descriptor,
    Heartbeat,
    Hello,
    LeaseRef,
    Nack,
    NackReason,
    Pulse,
    Refused,
    Release,
    Welcome,
)
from common.contracts.sequences import ONE_RING, SequenceSet, Shard
from common.errors import ConfigError, MessageError, RingError, SlotStateError
from common.ring.layout import PAGE_BYTES

# A lease whose answer is older than this many others is no longer on the owner's record.
_OUTCOMES_KEPT = 65_536
# Exceptions told in one set, so that a heartbeat stays below the largest message. To tell less is
# safe: the owner only believes less to be trained, until the low watermark has caught up.
_MOST_TOLD = 40_000
# A Hello of this worker's dead process may be read after this one's, once; a second time means that
# the other process lives.
_TIMES_REPLACED = 2
_log = logging.getLogger(__name__)


class WorkerProtocol:
    """All state of one consumer but its memory and its socket. Sequences are the ring's own."""

    def __init__(
        self,
        *,
        worker_id: str,
        group: str,
        capacity: int,
        consumed: SequenceSet | None = None,
        shard: Shard = ONE_RING,
    ) -> None:
        known = consumed or SequenceSet()
        self.worker_id = worker_id
        self.shard = shard
        self.is_drained = False
        self.outbox: deque[Record] = deque()
        self._group = group
        self._capacity = capacity
        self._consumed = set(known.above)
        self._committed = set(known.above)
        self._staged: set[int] = set()
        self._settled_below = known.low
        self._num_busy = 0
        self._num_replaced = 0
        self._num_void = 0
        """Buffers that a copy under an ended session's lease still occupies."""
        self._told: tuple[SequenceSet, SequenceSet] | None = None
        self._held: dict[int, LeaseRef] = {}
        self._outcomes: OrderedDict[int, NackReason | None] = OrderedDict()
        self.begin_session(num_acquired=0)

    def begin_session(self, num_acquired: int) -> None:
        """Draw a fresh session. What the old one held is void; `num_acquired` are still copied."""
        self.session = secrets.randbits(64)
        self.welcome: Welcome | None = None
        """Of an owner whose segment is attached: before, the worker offers no buffer (R4)."""
        self._pulse: Pulse | None = None
        self._number = 0
        self._told_capacity = 0
        self._num_void += num_acquired
        self._held.clear()
        self._outcomes.clear()
        self.outbox.clear()

    # -- what the worker says --------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Leases that are not answered yet."""
        return len(self._held)

    @property
    def consumed(self) -> SequenceSet:
        """What this worker's weights contain, together with all that is settled group-wide."""
        return SequenceSet.of(self._consumed, low=self._settled_below)

    @property
    def is_settled(self) -> bool:
        """The stream has ended and nothing of the group is on its way."""
        return self._pulse is not None and self._pulse.is_settled

    def mark_consumed(self, sequences: set[int]) -> None:
        """These sequences are in an applied optimizer step."""
        self._consumed |= sequences
        self._staged -= sequences
        self._told = None

    def mark_committed(self, sequences: set[int] | None = None) -> None:
        """Every consumed sequence is in a durable checkpoint, or these of them are."""
        self._committed |= self._consumed if sequences is None else sequences & self._consumed
        self._told = None

    def forget(self, sequences: set[int]) -> bool:
        """The weights do not contain these: whether a next Hello says less for it."""
        lost = sequences & (self._consumed | self._staged) - self._committed
        self._consumed -= lost
        self._staged -= lost
        self._told = None
        return bool(lost)

    def return_buffer(self) -> None:
        """A staging buffer is free again: say so where the owner knows of no other one (R4)."""
        if self._num_busy == 0:
            raise SlotStateError("a buffer was returned that no release had filled")
        self._num_busy -= 1
        if self.welcome is not None and self._told_capacity <= len(self._held):
            self.outbox.append(
                Credit(
                    ring_epoch=self.welcome.ring_epoch,
                    session=self.session,
                    number=self._next_number(),
                    capacity=self._tell_capacity(),
                )
            )

    def finish(self, told: Descriptor, reason: NackReason | None) -> bool:
        """End a lease: LEASED -release-> RELEASED, or -requeue-> READY with a reason.

        Returns:
            Whether the copy is to be trained on. One of an ended session is void: the session's
            successor has said Hello without its row, which comes again.
        """
        if told.session != self.session:
            self._num_void -= 1
            return False
        if reason is None:
            self._num_busy += 1
            if told.sequence >= self._settled_below and told.sequence not in self._consumed:
                self._staged.add(told.sequence)
        # Lease ids begin again with each ring_epoch: an older session's must not end this one's.
        if self._held.pop(told.lease.lease_id, None) is not None:
            self._outcomes[told.lease.lease_id] = reason
            if len(self._outcomes) > _OUTCOMES_KEPT:
                self._outcomes.popitem(last=False)
        self.outbox.append(self._outcome(told, reason))
        return reason is None

    def hello(self) -> None:
        """Say who this is, what its weights contain and what it holds (R8)."""
        consumed, committed = self._tell()
        self.outbox.append(
            Hello(
                worker_id=self.worker_id,
                session=self.session,
                number=self._next_number(),
                group=self._group,
                shard=self.shard,
                capacity=self._tell_capacity(),
                pid=os.getpid(),
                consumed=consumed,
                committed=committed,
                staged=SequenceSet.of(self._staged),
            )
        )

    def beat(self) -> None:
        """Say what is held and done, absolute; nothing before the welcome."""
        if self.welcome is None:
            return
        consumed, committed = self._tell()
        self.outbox.append(
            Heartbeat(
                ring_epoch=self.welcome.ring_epoch,
                session=self.session,
                number=self._next_number(),
                capacity=self._tell_capacity(),
                held=tuple(self._held.values()),
                consumed=consumed,
                committed=committed,
            )
        )

    def bye(self, welcome: Welcome | None = None, *, is_finished: bool = False) -> None:
        """The session ends on purpose; `welcome` is one whose segment cannot be attached."""
        welcome = welcome or self.welcome
        if welcome is None:
            return
        self.outbox.append(
            Bye(
                ring_epoch=welcome.ring_epoch,
                session=self.session,
                committed=self._tell()[1],
                is_finished=is_finished,
            )
        )

    # -- what the owner says ---------------------------------------------------------------------

    def take(self, told: Descriptor) -> bool:
        """Take a lease into a free buffer; answer a finished one again; drop the rest (R3, R4)."""
        welcome = self.welcome
        if welcome is None or (told.session, told.ring_epoch) != (self.session, welcome.ring_epoch):
            return False
        _check_bounds(told, welcome)
        lease_id = told.lease.lease_id
        if lease_id in self._outcomes:
            self.outbox.append(self._outcome(told, self._outcomes[lease_id]))
            return False
        if lease_id in self._held or len(self._held) >= self._free_capacity():
            return False
        self._held[lease_id] = told.lease
        return True

    def hear(self, pulse: Pulse) -> None:
        """Note the stream's state; forget what is settled."""
        welcome = self.welcome
        if welcome is None or (pulse.session, pulse.ring_epoch) != (
            self.session,
            welcome.ring_epoch,
        ):
            return
        if self._pulse is not None and pulse.number < self._pulse.number:
            return
        self._pulse = pulse
        self.is_drained = self.is_drained or pulse.is_drained
        if pulse.settled_below > self._settled_below:
            self._settled_below = pulse.settled_below
            for sequences in (self._consumed, self._committed, self._staged):
                sequences -= {s for s in sequences if s < self._settled_below}
            self._told = None

    def is_refused(self, refused: Refused) -> bool:
        """Whether this session is over; raise where a fresh one would be refused as well."""
        if refused.session != self.session:
            return False
        if refused.kind == "unknown_group":
            raise ConfigError(f"worker {self.worker_id!r}: {refused.reason}")
        if refused.kind == "other_shard":
            raise ConfigError(
                f"worker {self.worker_id!r}: {refused.reason}; give target servers and workers the "
                f"same target.replicas"
            )
        self._num_replaced += refused.kind == "replaced"
        if self._num_replaced >= _TIMES_REPLACED:
            raise RingError(
                f"worker {self.worker_id!r}: {refused.reason}; this process stops. Two workers "
                f"must not have one name"
            )
        _log.warning("session %016x is refused (%s): begin a fresh one", self.session, refused.kind)
        return True

    def _tell(self) -> tuple[SequenceSet, SequenceSet]:
        """Return consumed and committed as messages say them."""
        if self._told is None:
            low = self._settled_below
            self._told = (
                SequenceSet.of(self._consumed, low=low).lowest(_MOST_TOLD),
                SequenceSet.of(self._committed, low=low).lowest(_MOST_TOLD),
            )
        return self._told

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _tell_capacity(self) -> int:
        self._told_capacity = self._free_capacity()
        return self._told_capacity

    def _free_capacity(self) -> int:
        """Buffers that are free or under a lease of this session; none without memory (R4)."""
        if self.welcome is None:
            return 0
        return max(0, self._capacity - self._num_busy - self._num_void)

    def _outcome(self, told: Descriptor, reason: NackReason | None) -> Record:
        answer = {
            "ring_epoch": told.ring_epoch,
            "session": told.session,
            "number": self._next_number(),
            "capacity": self._tell_capacity(),
            "lease": told.lease,
        }
        return Release(**answer) if reason is None else Nack(**answer, reason=reason)  # type: ignore[arg-type]


def _check_bounds(told: Descriptor, welcome: Welcome) -> None:
    """Refuse a row that no slot of the ring can hold."""
    segment = welcome.segment
    slot_bytes = segment.num_bytes // segment.num_slots
    limits = {
        "slot": (told.lease.slot, segment.num_slots - 1),
        "num_bytes": (told.num_bytes, slot_bytes - PAGE_BYTES),
        "used_tokens": (told.used_tokens, welcome.row_schema.row_tokens),
    }
    for name, (value, most) in limits.items():
        if value > most:
            raise MessageError(
                "malformed",
                f"Descriptor of row {told.sequence}: {name} got {value}, at most {most}",
            )
