"""What is trained: released is not consumed, and what a dead session had comes again."""

import pytest

from common.contracts.sequences import SequenceSet
from common.ring.ledger import GroupLedger
from tests.rings import sequences

ONE, TWO, THREE = 1, 2, 3


def ledger_of(
    *released: int, session: int = ONE, settled: SequenceSet | None = None
) -> GroupLedger:
    ledger = GroupLedger(settled or SequenceSet())
    for sequence in released:
        ledger.publish(sequence)
        ledger.release(sequence, session)
    return ledger


def recaptures(ledger: GroupLedger) -> list[int]:
    taken = []
    while (sequence := ledger.next_recapture()) is not None:
        taken.append(sequence)
    return taken


def test_a_released_row_is_neither_lacked_nor_settled() -> None:
    ledger = ledger_of(0)
    assert not ledger.lacks(0)
    assert ledger.num_open == 1
    assert ledger.settled_below == 0


def test_a_commit_settles_what_its_session_holds_and_nothing_else() -> None:
    ledger = ledger_of(0, 1)
    ledger.publish(2)
    ledger.release(2, TWO)
    ledger.commit(ONE, sequences(0, 2))
    assert ledger.settled == sequences(0)
    assert ledger.num_committed == 1
    assert ledger.num_open == 2


def test_the_watermark_rises_over_gaps_once_they_are_filled() -> None:
    ledger = ledger_of(0, 1, 2)
    ledger.commit(ONE, sequences(1, 2))
    assert ledger.settled_below == 0
    ledger.commit(ONE, sequences(0, 1, 2))
    assert ledger.settled == SequenceSet(low=3)


def test_a_commit_that_comes_before_its_release_counts_from_the_release_on() -> None:
    ledger = GroupLedger(SequenceSet())
    ledger.publish(0)
    ledger.commit(ONE, sequences(0))
    assert ledger.settled_below == 0
    ledger.release(0, ONE)
    assert ledger.settled_below == 1
    assert ledger.num_committed == 1


def test_a_row_that_is_handed_over_is_settled_by_what_its_successor_has_committed() -> None:
    ledger = ledger_of(0, 1)
    ledger.commit(TWO, sequences(0))
    ledger.lose(ONE)
    ledger.welcome(TWO, sequences(0, 1))
    assert ledger.settled == sequences(0)
    assert ledger.num_open == 1


def test_a_successor_keeps_what_it_has_and_the_rest_comes_again() -> None:
    ledger = ledger_of(0, 1, 2)
    ledger.lose(ONE)
    ledger.welcome(TWO, sequences(1))
    assert recaptures(ledger) == [0, 2]
    assert ledger.lacks(0)
    assert not ledger.lacks(1)
    ledger.commit(TWO, sequences(1))
    assert ledger.settled == sequences(1)


def test_without_a_successor_every_uncommitted_row_comes_again_once() -> None:
    ledger = ledger_of(0, 1, 2)
    ledger.commit(ONE, sequences(0))
    ledger.lose(ONE)
    ledger.lose(ONE)
    assert recaptures(ledger) == [1, 2]
    assert ledger.num_awaited == 2
    ledger.publish(1)
    assert ledger.num_awaited == 1
    assert ledger.counts["recaptured"] == 1


def test_a_session_that_comes_back_late_cancels_what_it_has_after_all() -> None:
    ledger = ledger_of(0, 1)
    ledger.lose(ONE)
    assert ledger.next_recapture() == 0  # the target is at work on it
    ledger.welcome(TWO, sequences(0, 1))
    assert recaptures(ledger) == []
    assert ledger.num_awaited == 0
    assert not ledger.lacks(0)
    ledger.commit(TWO, sequences(0, 1))
    assert ledger.is_clear()


def test_a_restarted_owner_believes_what_live_sessions_hold() -> None:
    ledger = GroupLedger(sequences(low=2))
    ledger.welcome(ONE, sequences(4, low=3))
    assert [s for s in range(6) if ledger.lacks(s)] == [3, 5]
    assert ledger.num_open == 0  # this owner has not published them
    assert not ledger.is_clear()
    ledger.commit(ONE, sequences(4, low=3))
    assert ledger.settled == sequences(4, low=3)
    assert ledger.num_committed == 0


def test_what_an_adopted_row_s_session_loses_is_captured() -> None:
    ledger = GroupLedger(SequenceSet())
    ledger.welcome(ONE, sequences(0, 1))
    assert not ledger.lacks(0)
    ledger.lose(ONE)
    assert recaptures(ledger) == [0]
    assert ledger.lacks(0)
    assert ledger.lacks(1)
    ledger.publish(0)
    assert (ledger.num_open, ledger.counts["recaptured"]) == (1, 0)


def test_a_claim_of_any_size_costs_no_memory() -> None:
    ledger = GroupLedger(SequenceSet())
    ledger.welcome(ONE, SequenceSet(low=1 << 62))
    assert not ledger.lacks(1 << 61)
    assert ledger.settled_below == 0


def test_a_dropped_row_is_settled_whatever_its_state() -> None:
    ledger = ledger_of(0)
    ledger.publish(1)
    for sequence in (0, 1, 7):
        ledger.drop(sequence)
    assert ledger.settled == SequenceSet(low=2)
    assert ledger.is_clear()


def test_known_settled_rows_are_taken_in_any_form() -> None:
    ledger = GroupLedger(SequenceSet(low=1, above=(1, 2, 5)))
    assert ledger.settled == sequences(5, low=3)
    assert not ledger.lacks(2)
    assert ledger.lacks(4)


def test_consumed_rows_are_counted_for_the_session_that_holds_them() -> None:
    ledger = ledger_of(0, 1, 2)
    ledger.commit(ONE, sequences(0))
    assert ledger.num_consumed({ONE: sequences(0, 1), TWO: sequences(2)}) == 2


@pytest.mark.parametrize("taken", [0, 2])
def test_nothing_is_kept_of_sessions_and_rows_that_are_over(taken: int) -> None:
    ledger = GroupLedger(SequenceSet())
    for sequence in range(100):
        session = sequence + 10
        ledger.welcome(session, sequences(low=sequence))
        ledger.publish(sequence)
        ledger.release(sequence, session)
        if taken:
            ledger.lose(session)
            assert ledger.next_recapture() == sequence
            ledger.publish(sequence)
            ledger.release(sequence, THREE)
            ledger.commit(THREE, sequences(low=sequence + 1))
            ledger.lose(THREE)
        else:
            ledger.commit(session, sequences(low=sequence + 1))
            ledger.lose(session)
    kept = [name for name, value in vars(ledger).items() if name != "counts" and value and name not in
            ("_low", "_num_committed")]  # fmt: skip
    assert kept == []
    assert ledger.settled_below == 100
