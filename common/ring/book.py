"""Slots and deliveries of one ring: the owner's memory of who has what. No clock, no socket.

Every method names its transition. Groups are fixed at publish; inside a group a row goes to one
session at a time. Accounts hold per group: published = released + poison + skipped + in the ring.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.contracts.ring_messages import Descriptor, LeaseRef
from common.contracts.rows import Split
from common.errors import SlotStateError
from common.ring.states import (
    TERMINAL,
    DeliveryState,
    SlotState,
    next_delivery_state,
    next_slot_state,
)


class PublishedRow(NamedTuple):
    """What a descriptor says of a published row."""

    sequence: int
    split: Split
    used_tokens: int
    num_bytes: int
    token_hash: int


@dataclass(slots=True)
class Lease:
    """One session's timed right to read a slot."""

    ref: LeaseRef
    """As messages name it."""
    session: int
    granted_at: float
    expires_at: float
    seen_at: float
    """When its descriptor was last sent, or the session last listed it."""

    def renew(self, now: float, seconds: float, longest: float) -> None:
        """Let it go on for `seconds`, at most until it is `longest` seconds old (R5)."""
        self.expires_at = min(now + seconds, self.granted_at + longest)
        self.seen_at = now


@dataclass(slots=True)
class Delivery:
    """One row's way to one group."""

    slot: int
    generation: int
    group: str
    row: PublishedRow
    published_at: float
    state: DeliveryState = DeliveryState.READY
    attempts: int = 0
    lease: Lease | None = None
    avoid_session: int = 0

    @property
    def ref(self) -> LeaseRef:
        """The current lease as messages name it."""
        if self.lease is None:
            raise SlotStateError(f"slot {self.slot}, group {self.group!r} has no lease")
        return self.lease.ref


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    generation: int = 0
    deliveries: dict[str, Delivery] = field(default_factory=dict)


class SlotBook:
    """The states of all slots and deliveries.

    Args:
        watermarks: slots in use at which `loan` begins to wait, and the published ones down to
            which it then waits; by default all slots, and all but one.
    """

    def __init__(
        self, num_slots: int, groups: Iterable[str], watermarks: tuple[int, int] | None = None
    ) -> None:
        self.high_watermark, self.low_watermark = watermarks or (num_slots, num_slots - 1)
        self._is_draining = False
        """The last loan was refused: the ring is to be at the low watermark before the next one."""
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = deque(range(num_slots))
        self._states = Counter({SlotState.FREE: num_slots})
        self._ready: dict[str, OrderedDict[int, Delivery]] = {g: OrderedDict() for g in groups}
        """READY deliveries by slot, the next to be leased first."""
        self._leased: dict[int, Delivery] = {}
        self._held: defaultdict[int, dict[int, Delivery]] = defaultdict(dict)
        """LEASED deliveries by lease id, and the same by session."""
        self._num_leased: Counter[str] = Counter()
        self._next_lease_id = 1
        self.accounts: dict[str, Counter[str]] = {group: Counter() for group in self._ready}

    def loan(self) -> int | None:
        """FREE -loan-> WRITING: return a slot, or None where the ring is too full."""
        self._is_draining = self.is_blocked()
        if self._is_draining:
            return None
        slot = self._free.popleft()
        self._move_slot(slot, "loan")
        return slot

    def abort(self, slot: int) -> None:
        """WRITING -abort-> FREE."""
        self._move_slot(slot, "abort")
        self._free.append(slot)

    def next_generation(self, slot: int) -> int:
        """Return the generation that the slot's next publish will have."""
        return self._slots[slot].generation + 1

    def publish(self, slot: int, row: PublishedRow, groups: Iterable[str], now: float) -> None:
        """WRITING -publish-> PUBLISHED, with one READY delivery a group."""
        self._move_slot(slot, "publish")
        entry = self._slots[slot]
        entry.generation += 1
        for group in groups:
            delivery = Delivery(slot, entry.generation, group, row, now)
            entry.deliveries[group] = self._ready[group][slot] = delivery
            self.accounts[group]["published"] += 1

    def next_ready(self, group: str, session: int, *, has_others: bool) -> Delivery | None:
        """Return the oldest READY delivery, past those that prefer another session (R5)."""
        for delivery in self._ready[group].values():
            if not (has_others and delivery.avoid_session == session):
                return delivery
        return None

    def lease(self, delivery: Delivery, session: int, now: float, expires_at: float) -> int:
        """READY -lease-> LEASED: return the lease's id."""
        self._move(delivery, "lease")
        del self._ready[delivery.group][delivery.slot]
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        ref = LeaseRef.of_valid(
            slot=delivery.slot, generation=delivery.generation, lease_id=lease_id
        )
        delivery.lease = Lease(ref, session, now, expires_at, now)
        self._leased[lease_id] = self._held[session][lease_id] = delivery
        self._num_leased[delivery.group] += 1
        return lease_id

    def release(self, delivery: Delivery) -> None:
        """LEASED -release-> RELEASED; the slot is freed with its last delivery."""
        self._move(delivery, "release")
        self._end_lease(delivery)
        self._finish(delivery, "released")

    def requeue(self, delivery: Delivery, max_attempts: int, *, counts: bool) -> None:
        """LEASED -requeue-> READY, or LEASED -poison-> POISON where attempts are spent.

        `counts` is False where the lease never reached a worker (a failed send).
        """
        attempts = delivery.attempts + int(counts)
        is_spent = attempts >= max_attempts
        self._move(delivery, "poison" if is_spent else "requeue")
        delivery.attempts = attempts
        delivery.avoid_session = self._end_lease(delivery)
        if is_spent:
            self._finish(delivery, "poison")
            return
        self.accounts[delivery.group]["requeued"] += int(counts)
        ready = self._ready[delivery.group]
        ready[delivery.slot] = delivery
        ready.move_to_end(delivery.slot, last=False)

    def skip(self, delivery: Delivery) -> None:
        """READY -skip-> SKIPPED."""
        self._move(delivery, "skip")
        del self._ready[delivery.group][delivery.slot]
        self._finish(delivery, "skipped")

    def current(self, ref: LeaseRef, session: int) -> Delivery | None:
        """Return the delivery whose current lease is `ref` held by `session`, else None (R2)."""
        delivery = self._leased.get(ref.lease_id)
        if delivery is None or delivery.lease is None or delivery.lease.session != session:
            return None
        is_same = delivery.slot == ref.slot and delivery.generation == ref.generation
        return delivery if is_same else None

    def leases(self, session: int | None = None) -> list[Delivery]:
        """Return the LEASED deliveries, of one session or of all."""
        held = self._leased if session is None else self._held.get(session, {})
        return list(held.values())

    def num_leases(self, session: int) -> int:
        """Return how many leases a session has on record."""
        return len(self._held.get(session, ()))

    def postpone(self, seconds: float) -> None:
        """Move the deadlines of every lease."""
        for delivery in self._leased.values():
            if delivery.lease is not None:
                delivery.lease.granted_at += seconds
                delivery.lease.expires_at += seconds
                delivery.lease.seen_at += seconds

    def has_ready(self, group: str) -> bool:
        """Whether a row of a group waits for a session."""
        return bool(self._ready[group])

    def ready(self, group: str) -> list[Delivery]:
        """Return the READY deliveries of a group, the next to be leased first."""
        return list(self._ready[group].values())

    def in_ring(self, group: str) -> int:
        """Return how many deliveries of a group are READY or LEASED."""
        return len(self._ready[group]) + self._num_leased[group]

    def is_blocked(self) -> bool:
        """Whether the ring lends nothing: it is at the high watermark, or not yet at the low one.

        A slot in WRITING counts for the high one alone. Its writer may be the one who asks for the
        next slot, and to wait for what it has not published would be to wait for ever.
        """
        if len(self._slots) - len(self._free) >= self.high_watermark:
            return True
        return self._is_draining and self._states[SlotState.PUBLISHED] > self.low_watermark

    def num_writing(self) -> int:
        """Return how many slots are WRITING."""
        return self._states[SlotState.WRITING]

    def slot_counts(self) -> dict[str, int]:
        """Return slots by state."""
        return {state.value: self._states[state] for state in SlotState}

    def delivery_counts(self) -> dict[str, int]:
        """Return deliveries of published slots by state."""
        counts = Counter(d.state.value for slot in self._slots for d in slot.deliveries.values())
        return {state.value: counts[state.value] for state in DeliveryState}

    def _move_slot(self, slot: int, event: str) -> None:
        entry = self._slots[slot]
        state = next_slot_state(slot, entry.state, event)
        self._states[entry.state] -= 1
        self._states[state] += 1
        entry.state = state

    def _move(self, delivery: Delivery, event: str) -> None:
        delivery.state = next_delivery_state(delivery.slot, delivery.group, delivery.state, event)

    def _end_lease(self, delivery: Delivery) -> int:
        """Take the lease off the record and return the session that held it."""
        lease = delivery.lease
        if lease is None:
            raise SlotStateError(f"slot {delivery.slot}, group {delivery.group!r} has no lease")
        delivery.lease = None
        lease_id, held = lease.ref.lease_id, self._held[lease.session]
        del self._leased[lease_id], held[lease_id]
        if not held:
            del self._held[lease.session]
        self._num_leased[delivery.group] -= 1
        return lease.session

    def _finish(self, delivery: Delivery, account: str) -> None:
        self.accounts[delivery.group][account] += 1
        entry = self._slots[delivery.slot]
        for other in entry.deliveries.values():
            if other.state not in TERMINAL:
                return
        entry.deliveries = {}
        self._move_slot(delivery.slot, "free")
        self._free.append(delivery.slot)


def describe(delivery: Delivery, ring_epoch: int) -> Descriptor:
    """Return the message that grants a delivery's current lease to its holder."""
    if delivery.lease is None:
        raise SlotStateError(f"slot {delivery.slot}, group {delivery.group!r} has no lease")
    row = delivery.row
    return Descriptor.of_valid(
        ring_epoch=ring_epoch,
        session=delivery.lease.session,
        lease=delivery.lease.ref,
        sequence=row.sequence,
        split=row.split,
        attempt=delivery.attempts,
        used_tokens=row.used_tokens,
        num_bytes=row.num_bytes,
        token_hash=row.token_hash,
    )
