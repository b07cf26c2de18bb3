"""Rule R8 at the owner: released is not consumed, and what a dead session had comes again."""

import pytest

from common.contracts.ring_messages import Descriptor
from common.contracts.sequences import SequenceSet
from tests.rings import Bench, Worker, make_groups, sequences

SESSION_TIMEOUT, RESUME_WAIT = 1.0, 0.2


def take_all(worker: Worker) -> None:
    """Release every lease of a worker; its buffers are free again at once."""
    for lease in worker.leases():
        worker.release(lease)


def test_release_frees_the_slot_and_the_row_is_still_owed() -> None:
    bench = Bench(num_slots=1)
    worker = bench.worker()
    bench.publish(0)
    take_all(worker)
    assert bench.owner.book.slot_counts()["free"] == 1
    assert bench.owner.settled_below() == 0
    assert not bench.owner.wants(0)
    worker.beat(committed=sequences(0))
    assert bench.owner.settled_below() == 1


def test_a_dead_session_s_rows_come_again_after_resume_wait() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0, 1)
    take_all(worker)
    worker.beat(committed=sequences(0))
    bench.wait(SESSION_TIMEOUT)
    assert bench.recaptures() == []
    bench.wait(RESUME_WAIT + 0.2)
    assert bench.recaptures() == [1]
    assert bench.owner.wants(1)


def test_a_successor_takes_over_what_its_hello_holds() -> None:
    bench = Bench(num_slots=4)
    old = bench.worker(capacity=3)
    bench.publish(0, 1, 2)
    take_all(old)
    new = bench.worker(consumed=sequences(0), staged=sequences(2))
    assert bench.recaptures() == [1]
    new.beat(consumed=sequences(0, 2), committed=sequences(0, 2))
    assert bench.owner.ledgers["main"].settled == sequences(0, 2)


def test_what_a_hello_says_is_durable_is_settled_even_if_nothing_follows_it() -> None:
    bench = Bench()
    old = bench.worker()
    bench.publish(0, 1)
    take_all(old)
    new = bench.worker(consumed=sequences(0, 1), committed=sequences(0))
    new.bye()
    assert bench.owner.settled_below() == 1
    assert bench.recaptures() == [1]


def test_a_successor_that_comes_late_cancels_what_it_holds_after_all() -> None:
    bench = Bench()
    old = bench.worker()
    bench.publish(0, 1)
    take_all(old)
    bench.wait(SESSION_TIMEOUT + RESUME_WAIT + 0.2)
    assert bench.owner.next_recapture() == 0
    bench.worker(consumed=sequences(0, 1))
    assert bench.recaptures() == []
    bench.publish(0)  # it was being captured: no group lacks it any more
    assert bench.owner.book.slot_counts()["free"] == 4
    assert bench.accounts()["published"] == 2


def test_a_successor_in_another_group_inherits_nothing() -> None:
    bench = Bench(groups=make_groups("a", "b"))
    old = bench.worker("w", "a")
    bench.publish(0)
    take_all(old)
    bench.worker("w", "b", consumed=sequences(0))
    bench.wait(RESUME_WAIT + 0.2)
    assert bench.recaptures() == [0]
    assert bench.owner.ledgers["a"].num_awaited == 1
    assert bench.owner.ledgers["b"].num_awaited == 0


def test_a_goodbye_returns_what_is_not_committed_at_once() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0, 1)
    take_all(worker)
    worker.bye(committed=sequences(0))
    assert bench.recaptures() == [1]
    bench.owner.end(1)
    assert not bench.owner.is_drained()
    bench.publish(1)
    other = bench.worker("other")
    take_all(other)
    other.bye(committed=sequences(1))
    assert bench.owner.is_drained()
    assert bench.owner.ledgers["main"].num_committed == 2


def test_a_goodbye_that_commits_a_leased_row_stands_for_its_lost_release() -> None:
    """Else the row would be trained twice without a requeue."""
    bench = Bench()
    worker = bench.worker()
    bench.publish(0, 1)
    assert len(worker.leases()) == 2
    worker.bye(committed=sequences(0))
    other = bench.worker("other")
    assert [told.sequence for told in other.told(Descriptor)] == [1]
    assert bench.accounts()["released"] == 1
    assert bench.recaptures() == []
    assert bench.owner.ledgers["main"].num_committed == 1


def test_a_row_captured_again_goes_only_to_the_group_that_lacks_it() -> None:
    bench = Bench(groups=make_groups("a", "b"))
    one, two = bench.worker("one", "a"), bench.worker("two", "b")
    bench.publish(0)
    take_all(one)
    take_all(two)
    one.bye()
    assert bench.recaptures() == [0]
    bench.publish(0)
    assert two.leases() == []
    take_all(bench.worker("three", "a"))
    assert bench.accounts("a")["released"] == 2
    assert bench.accounts("b")["published"] == 1


def test_a_row_that_two_groups_lost_is_captured_once() -> None:
    bench = Bench(groups=make_groups("a", "b"))
    one, two = bench.worker("one", "a"), bench.worker("two", "b")
    bench.publish(0)
    take_all(one)
    take_all(two)
    one.bye()
    two.bye()
    assert bench.recaptures() == [0]
    bench.publish(0)
    assert [ledger.num_awaited for ledger in bench.owner.ledgers.values()] == [0, 0]


def test_the_lowest_group_says_what_need_not_be_made_again() -> None:
    bench = Bench(groups=make_groups("a", "b"), settled={"a": SequenceSet(low=5)})
    assert bench.owner.settled_below() == 0
    assert bench.owner.wants(3)
    bench.publish(3)
    assert bench.accounts("a")["published"] == 0
    assert bench.accounts("b")["published"] == 1


def test_a_restarted_owner_does_not_make_again_what_live_workers_hold() -> None:
    bench = Bench(settled={"main": SequenceSet(low=2)})
    one = bench.worker("one", consumed=sequences(3, low=2), committed=SequenceSet(low=2))
    two = bench.worker("two", consumed=SequenceSet(low=2), staged=sequences(4))
    assert [s for s in range(7) if bench.owner.wants(s)] == [2, 5, 6]
    assert bench.owner.ledgers["main"].num_settled_before == 2
    one.beat(committed=sequences(3, low=2))
    assert bench.owner.ledgers["main"].num_settled_before == 3
    two.bye()
    assert bench.recaptures() == [4]
    assert bench.owner.ledgers["main"].settled == sequences(3, low=2)


def test_a_restarted_owner_is_drained_only_when_adopted_rows_are_committed() -> None:
    bench = Bench()
    worker = bench.worker(consumed=sequences(0, 1))
    assert not bench.owner.wants(0)
    assert not bench.owner.wants(1)
    bench.owner.end(1)
    worker.bye(committed=sequences(0))
    assert not bench.owner.is_drained()
    assert bench.recaptures() == [1]


def test_a_claim_outlives_its_session_until_nobody_comes_for_it() -> None:
    bench = Bench()
    bench.worker(consumed=sequences(0, 1))
    bench.wait(SESSION_TIMEOUT + 0.1)
    assert not bench.owner.wants(0)
    bench.wait(RESUME_WAIT)
    assert bench.recaptures() == [0]
    assert bench.owner.wants(1)


@pytest.mark.parametrize("kind", ["consumed", "staged"])
def test_who_says_late_what_it_holds_does_not_get_it_again(kind: str) -> None:
    """A restarted owner has published rows before the Hello of a worker that has them came."""
    bench = Bench()
    bench.publish(0, 1, 2)
    worker = bench.worker(**{kind: sequences(0, 2)})
    assert [told.sequence for told in worker.told(Descriptor)] == [1]
    assert bench.owner.book.slot_counts()["free"] == 3, "nobody waits for the others any more"
    worker.beat(consumed=sequences(0, 2), committed=sequences(0, 2))
    assert bench.owner.ledgers["main"].settled == sequences(0, 2)
    worker.bye()
    assert bench.recaptures() == []


def test_what_was_held_of_late_comes_again_when_its_holder_goes() -> None:
    bench = Bench()
    bench.publish(0)
    worker = bench.worker(staged=sequences(0))
    worker.bye()
    assert bench.recaptures() == [0]


def test_poison_needs_no_commit() -> None:
    bench = Bench(max_attempts=1)
    worker = bench.worker()
    bench.publish(0)
    worker.nack(worker.leases()[0])
    bench.owner.end(0)
    worker.bye()
    assert bench.owner.is_drained()


def test_an_owner_that_was_stopped_itself_waits_as_long_for_a_successor() -> None:
    bench = Bench(session_timeout_seconds=1.0, resume_wait_seconds=1.0)
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    worker.release(lease)
    bench.wait(1.3)  # the session has ended, and its row waits for the worker's next one
    assert len(bench.owner.sessions) == 0
    bench.now += 60.0
    bench.owner.postpone(60.0)
    bench.owner.tick(bench.now)
    assert bench.recaptures() == []
    bench.wait(1.1)
    assert bench.recaptures() == [0]
