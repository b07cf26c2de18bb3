"""Slots and deliveries: two tables of transitions, and accounts that always add up."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config.shared import RingTable
from common.contracts.ring_messages import LeaseRef
from common.errors import SlotStateError
from common.ring.book import Delivery, SlotBook, describe
from common.ring.states import (
    DELIVERY_TRANSITIONS,
    SLOT_TRANSITIONS,
    DeliveryState,
    SlotState,
    next_delivery_state,
    next_slot_state,
)
from tests.rings import row

GROUPS = ("a", "b")


def published(book: SlotBook, sequence: int, groups: tuple[str, ...] = GROUPS) -> int:
    slot = book.loan()
    assert slot is not None
    book.publish(slot, row(sequence), groups, now=0.0)
    return slot


def leased(book: SlotBook, group: str, session: int = 1) -> Delivery:
    delivery = book.next_ready(group, session, has_others=False)
    assert delivery is not None
    book.lease(delivery, session, now=0.0, expires_at=1.0)
    return delivery


def test_every_transition_outside_the_tables_is_refused() -> None:
    slot_events = {event for _, event in SLOT_TRANSITIONS}
    for pair in set(itertools.product(SlotState, slot_events)) - set(SLOT_TRANSITIONS):
        with pytest.raises(SlotStateError):
            next_slot_state(3, *pair)
    delivery_events = {event for _, event in DELIVERY_TRANSITIONS}
    for pair in set(itertools.product(DeliveryState, delivery_events)) - set(DELIVERY_TRANSITIONS):
        with pytest.raises(SlotStateError):
            next_delivery_state(3, "a", *pair)


def test_a_full_ring_lends_nothing_until_a_slot_is_free() -> None:
    book = SlotBook(2, GROUPS)
    first, second = book.loan(), book.loan()
    assert {first, second} == {0, 1}
    assert book.loan() is None
    book.abort(1)
    assert book.loan() == 1


def test_from_the_high_watermark_a_loan_waits_for_the_low_one() -> None:
    book = SlotBook(6, ("a",), watermarks=(4, 1))
    for sequence in range(4):
        published(book, sequence, ("a",))
    assert book.loan() is None, "four of six are in use"
    for num_left in (3, 2):
        book.release(leased(book, "a"))
        assert book.loan() is None, f"{num_left} are left"
        assert book.is_blocked()
    book.release(leased(book, "a"))
    assert not book.is_blocked()
    for sequence in range(4, 7):
        published(book, sequence, ("a",))
    assert book.loan() is None, "at the high one again"


def test_below_the_high_watermark_nothing_waits() -> None:
    book = SlotBook(6, ("a",), watermarks=(4, 1))
    for sequence in range(20):
        for _ in range(3 if sequence == 0 else 1):
            published(book, sequence, ("a",))
        book.release(leased(book, "a"))


def test_a_slot_that_is_being_written_counts_for_the_high_watermark_alone() -> None:
    """Its writer may be who asks: to wait for its own publish would be to wait for ever."""
    book = SlotBook(4, ("a",), watermarks=(3, 0))
    published(book, 0, ("a",))
    published(book, 1, ("a",))
    writing = book.loan()
    assert writing is not None
    assert book.loan() is None
    for _ in range(2):
        assert book.loan() is None
        book.release(leased(book, "a"))
    assert book.num_writing() == 1
    assert book.loan() is not None, "nothing is published: the low watermark is met"


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7, 8, 30])
@pytest.mark.parametrize("high", [0.01, 0.1, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("low", [None, 0.0, 0.009])
def test_no_pair_of_watermarks_blocks_a_ring_for_ever(
    num_slots: int, high: float, low: float | None
) -> None:
    table = RingTable(num_slots=num_slots, high_watermark=high, low_watermark=low)
    book = SlotBook(num_slots, ("a",), table.watermark_slots)
    assert 0 <= book.low_watermark < book.high_watermark <= num_slots
    for _ in range(3):
        while not book.is_blocked():
            published(book, 0, ("a",))
        assert book.in_ring("a") == book.high_watermark
        while (slot := book.loan()) is None:
            book.release(leased(book, "a"))
        assert book.in_ring("a") == book.low_watermark
        book.abort(slot)


@pytest.mark.parametrize(
    ("num_slots", "low", "high", "slots"),
    [
        (8, None, 1.0, (8, 7)),
        (8, 0.25, 0.75, (6, 2)),
        (30, 0.05, 0.1, (3, 1)),
        (2, 0.4, 0.5, (1, 0)),
    ],
)
def test_watermarks_are_parts_of_the_ring(
    num_slots: int, low: float | None, high: float, slots: tuple[int, int]
) -> None:
    table = RingTable(num_slots=num_slots, low_watermark=low, high_watermark=high)
    assert table.watermark_slots == slots


@pytest.mark.parametrize("low", [0.5, 0.75])
def test_a_low_watermark_that_is_not_below_the_high_one_is_refused(low: float) -> None:
    with pytest.raises(ValueError, match=f"got {low}, expected less than high_watermark 0.5"):
        RingTable(low_watermark=low, high_watermark=0.5)


def test_a_slot_is_freed_when_every_group_is_done_with_it() -> None:
    book = SlotBook(1, GROUPS)
    published(book, 5)
    book.release(leased(book, "a"))
    assert book.slot_counts() == {"free": 0, "writing": 0, "published": 1}
    book.skip(book.ready("b")[0])
    assert book.slot_counts() == {"free": 1, "writing": 0, "published": 0}


def test_the_generation_of_a_slot_grows_with_publishes_and_not_with_requeues() -> None:
    book = SlotBook(1, ("a",))
    for generation in (1, 2, 3):
        published(book, generation, ("a",))
        delivery = leased(book, "a")
        book.requeue(delivery, 3, counts=True)
        delivery = leased(book, "a")
        assert delivery.generation == generation
        book.release(delivery)
    slot = book.loan()
    assert slot is not None
    book.abort(slot)
    assert book.next_generation(slot) == 4


def test_lease_ids_never_repeat() -> None:
    book = SlotBook(1, ("a",))
    published(book, 0, ("a",))
    seen = set()
    for _ in range(4):
        delivery = leased(book, "a")
        seen.add(delivery.ref.lease_id)
        book.requeue(delivery, 9, counts=True)
    assert len(seen) == 4


def test_a_requeued_row_goes_before_fresh_ones() -> None:
    book = SlotBook(3, ("a",))
    for sequence in range(3):
        published(book, sequence, ("a",))
    book.requeue(leased(book, "a"), 3, counts=True)
    assert [d.row.sequence for d in book.ready("a")] == [0, 1, 2]


def test_a_requeue_avoids_the_session_that_had_it_where_there_are_others() -> None:
    book = SlotBook(2, ("a",))
    published(book, 0, ("a",))
    published(book, 1, ("a",))
    book.requeue(leased(book, "a", session=1), 3, counts=True)
    other = book.next_ready("a", 1, has_others=True)
    assert other is not None
    assert other.row.sequence == 1
    alone = book.next_ready("a", 1, has_others=False)
    assert alone is not None
    assert alone.row.sequence == 0


def test_attempts_that_are_spent_poison_the_delivery_of_that_group_only() -> None:
    book = SlotBook(1, GROUPS)
    published(book, 0)
    for _ in range(2):
        delivery = leased(book, "a")
        book.requeue(delivery, 2, counts=True)
    assert delivery.state is DeliveryState.POISON
    assert book.accounts["a"]["poison"] == 1
    assert len(book.ready("b")) == 1


@pytest.mark.parametrize("change", ["slot", "generation", "lease_id", "session"])
def test_a_reference_is_current_only_if_all_of_it_matches(change: str) -> None:
    book = SlotBook(2, ("a",))
    published(book, 0, ("a",))
    delivery = leased(book, "a", session=7)
    assert book.current(delivery.ref, 7) is delivery
    fields = delivery.ref.model_dump() | {"session": 7}
    fields[change] += 1
    session = fields.pop("session")
    assert book.current(LeaseRef(**fields), session) is None


def test_a_delivery_without_a_lease_has_no_reference_and_no_descriptor() -> None:
    book = SlotBook(1, ("a",))
    published(book, 0, ("a",))
    delivery = book.ready("a")[0]
    with pytest.raises(SlotStateError):
        _ = delivery.ref
    with pytest.raises(SlotStateError):
        describe(delivery, 1)


class BookMachine(RuleBasedStateMachine):
    """Random calls; the indexes of the book must always say what its slots say."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SlotBook(3, GROUPS)
        self.writing: list[int] = []
        self.sequence = 0

    @rule()
    def loan(self) -> None:
        slot = self.book.loan()
        if slot is not None:
            self.writing.append(slot)

    @precondition(lambda self: self.writing)
    @rule()
    def abort(self) -> None:
        self.book.abort(self.writing.pop())

    @precondition(lambda self: self.writing)
    @rule(groups=st.sets(st.sampled_from(GROUPS), min_size=1))
    def publish(self, groups: set[str]) -> None:
        self.book.publish(self.writing.pop(), row(self.sequence), sorted(groups), now=0.0)
        self.sequence += 1

    @rule(group=st.sampled_from(GROUPS), session=st.integers(1, 3), others=st.booleans())
    def lease(self, group: str, session: int, others: bool) -> None:
        delivery = self.book.next_ready(group, session, has_others=others)
        if delivery is not None:
            self.book.lease(delivery, session, 0.0, 1.0)

    @precondition(lambda self: self.book.leases())
    @rule(data=st.data(), how=st.sampled_from(["release", "requeue", "undo"]))
    def end_lease(self, data: st.DataObject, how: str) -> None:
        delivery = data.draw(st.sampled_from(self.book.leases()))
        if how == "release":
            self.book.release(delivery)
        else:
            self.book.requeue(delivery, 3, counts=how == "requeue")

    @rule(group=st.sampled_from(GROUPS))
    def skip(self, group: str) -> None:
        if self.book.ready(group):
            self.book.skip(self.book.ready(group)[0])

    @invariant()
    def accounts_add_up(self) -> None:
        for group in GROUPS:
            counts = self.book.accounts[group]
            ended = counts["released"] + counts["poison"] + counts["skipped"]
            assert counts["published"] == ended + self.book.in_ring(group)

    @invariant()
    def indexes_agree(self) -> None:
        counts = self.book.delivery_counts()
        assert counts["leased"] == len(self.book.leases())
        assert counts["leased"] == sum(self.book.num_leases(session) for session in (1, 2, 3))
        assert counts["ready"] == sum(len(self.book.ready(group)) for group in GROUPS)
        assert self.book.num_writing() == len(self.writing)
        assert sum(self.book.slot_counts().values()) == 3
        for delivery in self.book.leases():
            assert delivery.lease is not None
            assert self.book.current(delivery.ref, delivery.lease.session) is delivery


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_calls_keep_the_book_in_order = BookMachine.TestCase
