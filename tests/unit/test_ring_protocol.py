"""The owner's rules R2 to R8, one by one, with a clock that the test turns."""

import pytest

from common.contracts.ring_messages import Credit, LeaseRef, Pulse, Refused, Release, Welcome
from common.contracts.sequences import SequenceSet
from tests.rings import Bench, make_groups, sequences

LEASE, SESSION_TIMEOUT = 0.5, 1.0
STALE = {
    "ring_epoch": 1, "session": 99, "slot": 3, "generation": 9, "lease_id": 99,
}  # fmt: skip


# -- R2: leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", STALE)
@pytest.mark.parametrize("kind", ["release", "nack"])
def test_an_answer_that_does_not_match_the_current_lease_is_a_counted_no_op(
    kind: str, field: str
) -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    say = getattr(worker, kind)
    if field in LeaseRef.model_fields:
        say(LeaseRef(**{**lease.model_dump(), field: STALE[field]}))
    else:
        say(lease, **{field: STALE[field]})
    assert bench.owner.stale_calls[kind] == 1
    assert len(bench.owner.book.leases()) == 1
    assert bench.owner.reclaimed == {}


def test_an_answer_over_another_socket_is_a_counted_no_op() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    worker.release(worker.leases()[0], identity=b"somebody else")
    assert bench.owner.stale_calls["release"] == 1
    assert len(bench.owner.book.leases()) == 1


def test_a_second_release_is_a_counted_no_op() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    worker.release(lease)
    worker.release(lease)
    assert bench.owner.stale_calls["release"] == 1
    assert bench.accounts()["released"] == 1


def test_a_heartbeat_neither_creates_nor_revives_a_lease() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    bench.wait(LEASE)
    worker.beat(lease, LeaseRef(slot=1, generation=1, lease_id=50))
    assert bench.owner.book.leases() == []
    assert bench.owner.stale_calls["held"] == 2
    assert worker.leases() == []


# -- R3: lost messages -----------------------------------------------------------------------------


def test_a_lease_that_a_heartbeat_lacks_is_sent_again_as_it_is_and_costs_nothing() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    for _ in range(20):
        bench.wait(0.3)
        worker.beat()
        assert worker.leases() == [lease]
    assert bench.owner.book.leases()[0].attempts == 0
    assert bench.accounts()["requeued"] == 0


def test_a_lease_that_a_heartbeat_lists_is_not_sent_again() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    bench.wait(0.3)
    worker.beat(lease)
    assert worker.leases() == []


def test_a_heartbeat_that_left_before_the_descriptor_came_does_not_repeat_it() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    worker.leases()
    worker.beat()
    assert worker.leases() == []


def test_a_descriptor_that_cannot_be_sent_costs_no_attempt() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    for _ in range(5):
        (unsent,) = [record for _, record in bench.owner.outbox if hasattr(record, "lease")]
        bench.owner.outbox.clear()
        bench.owner.undo(unsent)
        assert bench.owner.book.leases() == []
        bench.wait(0.1)
    (lease,) = worker.leases()
    worker.release(lease)
    assert bench.accounts()["requeued"] == 0


# -- R4: credit ------------------------------------------------------------------------------------


def test_capacity_is_absolute_and_leases_on_record_are_taken_off() -> None:
    bench = Bench()
    worker = bench.worker(capacity=2)
    bench.publish(0, 1, 2, 3)
    first, second = worker.leases()
    for _ in range(3):  # repeating the number does not add to it
        worker.beat(first, second, capacity=2)
    assert worker.leases() == []
    worker.release(first, capacity=1)  # its buffer is busy now
    assert worker.leases() == []
    worker.beat(second, capacity=2)
    assert len(worker.leases()) == 1
    worker.beat(second, capacity=9)
    assert len(worker.leases()) == 1


def test_a_credit_says_the_capacity_and_asks_for_no_answer() -> None:
    bench = Bench()
    worker = bench.worker(capacity=0)
    worker.told(Welcome)
    bench.publish(0, 1, 2)
    worker.say(Credit, capacity=1)
    worker.say(Credit, capacity=1)  # repeating the number does not add to it
    assert len(worker.leases()) == 1
    worker.say(Credit, capacity=2)
    assert len(worker.leases()) == 1
    assert bench.owner.outbox == []


@pytest.mark.parametrize("late", [{"number": 1}, {"session": 99}, {"ring_epoch": 1}])
def test_a_credit_that_is_late_or_of_nobody_is_a_counted_no_op(late: dict) -> None:
    bench = Bench()
    worker = bench.worker(capacity=0)
    bench.publish(0)
    worker.say(Credit, capacity=1, **late)
    assert worker.leases() == []
    assert bench.owner.stale_calls["credit"] == 1


def test_a_number_that_came_out_of_order_changes_no_capacity() -> None:
    bench = Bench()
    worker = bench.worker(capacity=1)
    bench.publish(0, 1, 2)
    (lease,) = worker.leases()
    worker.beat(lease, capacity=1, number=10)
    worker.beat(lease, capacity=3, number=9)
    assert worker.leases() == []
    assert bench.owner.stale_calls["heartbeat"] == 1
    worker.release(lease, capacity=3, number=8)  # the lease ends all the same
    assert bench.accounts()["released"] == 1
    assert len(worker.leases()) == 1


def test_a_worker_without_room_gets_nothing() -> None:
    bench = Bench()
    worker = bench.worker(capacity=0)
    bench.publish(0)
    worker.beat(capacity=0)
    assert worker.leases() == []


def test_rows_go_to_the_least_loaded_session() -> None:
    bench = Bench()
    one, two = bench.worker("one"), bench.worker("two")
    bench.publish(0, 1, 2, 3)
    assert (len(one.leases()), len(two.leases())) == (2, 2)


def test_idle_sessions_take_turns() -> None:
    bench = Bench()
    workers = [bench.worker(name) for name in ("one", "two", "three")]
    taken = {worker.worker_id: 0 for worker in workers}
    for sequence in range(9):
        bench.publish(sequence)
        for worker in workers:
            for lease in worker.leases():
                taken[worker.worker_id] += 1
                worker.release(lease)
    assert taken == {"one": 3, "two": 3, "three": 3}


# -- R5: hung workers ------------------------------------------------------------------------------


def test_heartbeats_renew_a_lease_up_to_lease_max() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    for _ in range(13):
        bench.wait(0.1)
        worker.beat(lease)
    assert len(bench.owner.book.leases()) == 1
    for _ in range(3):
        bench.wait(0.1)
        worker.beat(lease)
    assert bench.owner.book.leases() == []
    assert bench.owner.reclaimed == {"expired": 1}


@pytest.mark.parametrize("how", ["release", "nack", "omit"])
def test_a_session_that_let_a_lease_expire_waits_until_it_answers_or_omits_it(how: str) -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    bench.wait(LEASE)
    worker.beat(lease)
    assert worker.leases() == []
    if how == "omit":
        worker.beat()
    else:
        getattr(worker, how)(lease)
    (again,) = worker.leases()
    assert again.lease_id != lease.lease_id
    assert bench.owner.book.leases()[0].attempts == 1


def test_a_hung_session_keeps_no_row_from_the_others_whatever_late_heartbeats_say() -> None:
    """Found by docs/models/slots.pml: without either half of the rule row 1 is never given away."""
    bench = Bench()
    hung, other = bench.worker("hung", capacity=1), bench.worker("other", capacity=1)
    bench.publish(0)
    (lease,) = hung.leases()
    bench.wait(LEASE)
    hung.beat(capacity=1)  # it left before the descriptor came, and is read after the expiry
    bench.publish(1)  # goes to the hung session, whose one buffer the first copy occupies
    (again,) = other.leases()
    other.release(again, capacity=0)
    for _ in range(20):
        bench.wait(0.1)
        hung.beat(lease, capacity=1)
        other.beat(capacity=1)
    assert bench.accounts()["requeued"] == 2
    assert {told.slot for told in other.leases()} == {1}


def test_a_requeued_row_prefers_another_session_even_a_busier_one() -> None:
    bench = Bench()
    one, two = bench.worker("one"), bench.worker("two")
    bench.publish(0, 1)
    one.release(one.leases()[0])
    assert len(two.leases()) == 1
    bench.publish(2)
    (lease,) = one.leases()
    one.nack(lease)
    assert [told.slot for told in two.leases()] == [lease.slot]
    assert one.leases() == []


# -- R6: accounts ----------------------------------------------------------------------------------


def test_a_row_that_spends_its_attempts_is_poison_and_its_slot_is_free() -> None:
    bench = Bench(num_slots=1, max_attempts=3)
    worker = bench.worker()
    bench.publish(0)
    for _ in range(3):
        worker.nack(worker.leases()[0])
    assert bench.accounts()["poison"] == 1
    assert bench.owner.book.slot_counts()["free"] == 1
    assert bench.owner.settled_below() == 1
    assert worker.leases() == []


def test_a_release_after_poison_is_counted_once_and_only_from_the_session_that_had_it() -> None:
    bench = Bench(max_attempts=1)
    worker, other = bench.worker(), bench.worker("other")
    bench.publish(0)
    (lease,) = worker.leases()
    bench.wait(LEASE)
    for _ in range(2):
        other.release(lease)
        worker.release(lease)
    assert bench.accounts()["poison_late"] == 1
    assert bench.owner.stale_calls["release"] == 4


def test_a_torn_nack_of_an_expired_lease_adds_no_attempt() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    bench.wait(LEASE)
    worker.nack(lease, reason="torn")
    assert bench.owner.stale_calls["nack"] == 1
    assert bench.owner.book.leases()[0].attempts == 1


def test_a_worker_that_stops_gives_its_rows_back_at_no_cost() -> None:
    bench = Bench(max_attempts=1)
    worker = bench.worker()
    bench.publish(0, 1)
    worker.nack(worker.leases()[0], reason="stopping", capacity=0)
    worker.bye()
    assert bench.accounts()["poison"] == 0
    assert len(bench.owner.book.ready("main")) == 2


# -- R7: end of stream -----------------------------------------------------------------------------


def test_settled_and_drained_are_told_in_every_pulse_once_they_hold() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    bench.owner.end(0)

    def pulse(**fields: object) -> tuple[int | None, bool, bool]:
        worker.beat(**fields)  # type: ignore[arg-type]
        (told,) = worker.told(Pulse)
        return told.last_sequence, told.is_settled, told.is_drained

    assert pulse() == (0, False, False)
    worker.release(lease)
    assert pulse(consumed=sequences(0)) == (0, True, False)
    assert pulse(committed=sequences(0)) == (0, True, True)
    assert pulse() == (0, True, True)
    assert not bench.owner.is_drained()
    worker.bye(committed=sequences(0))
    assert bench.owner.is_drained()


def test_a_written_slot_keeps_the_stream_open() -> None:
    bench = Bench()
    slot = bench.owner.book.loan()
    bench.owner.end(0)
    assert not bench.owner.is_drained()
    bench.owner.book.abort(slot or 0)
    assert bench.owner.is_drained()


def test_the_stream_is_open_while_rows_wait_for_a_successor() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    worker.release(worker.leases()[0])
    bench.owner.end(0)
    bench.wait(SESSION_TIMEOUT + 0.1)
    other = bench.worker("other")
    other.beat()
    assert [told.is_settled for told in other.told(Pulse)] == [False]


# -- sessions --------------------------------------------------------------------------------------


def test_a_hello_that_is_repeated_is_welcomed_again_and_changes_nothing() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    worker.hello()
    assert len(worker.told(Welcome)) == 2
    assert len(worker.leases()) == 1
    assert len(bench.owner.sessions) == 1


def test_a_group_that_is_not_of_the_run_is_refused() -> None:
    bench = Bench()
    (refused,) = bench.worker(group="other").told(Refused)
    assert refused.kind == "unknown_group"
    assert "'main'" in refused.reason


def test_a_session_that_the_owner_does_not_know_is_told_to_say_hello() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.beat(session=5)
    worker.beat(ring_epoch=5)
    assert [r.kind for r in worker.told(Refused)] == ["unknown_session"] * 2


def test_a_silent_session_is_over_and_never_comes_back() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    worker.leases()
    bench.wait(SESSION_TIMEOUT + 0.1)
    assert len(bench.owner.sessions) == 0
    assert bench.accounts()["requeued"] == 1
    worker.beat()
    worker.hello()
    assert [r.kind for r in worker.told(Refused)] == ["ended_session"] * 2
    assert len(bench.owner.sessions) == 0


def test_a_new_session_of_a_worker_ends_the_old_one_s_leases_at_once() -> None:
    bench = Bench()
    old = bench.worker()
    bench.publish(0)
    old.leases()
    new = bench.worker()
    assert [told.lease_id for told in new.leases()] == [2]
    assert bench.owner.reclaimed == {"replaced": 1}
    assert bench.owner.book.leases()[0].attempts == 1


def test_a_process_that_was_replaced_is_told_to_stop_and_cannot_take_its_name_back() -> None:
    bench = Bench()
    old = bench.worker()
    bench.wait(SESSION_TIMEOUT + 0.1)
    bench.worker()
    old.beat()
    old.hello()
    assert [r.kind for r in old.told(Refused)] == ["replaced"] * 2
    assert len(bench.owner.sessions) == 1


def test_an_owner_that_was_stopped_itself_blames_no_worker() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    (lease,) = worker.leases()
    bench.now += 60.0
    bench.owner.postpone(60.0)
    bench.owner.tick(bench.now)
    worker.release(lease)
    assert bench.owner.stale_calls["release"] == 0
    assert bench.owner.reclaimed == {}


# -- groups ----------------------------------------------------------------------------------------


def test_every_group_gets_each_row_and_a_slot_waits_for_all() -> None:
    bench = Bench(num_slots=1, groups=make_groups("a", "b"))
    one, two = bench.worker("one", "a"), bench.worker("two", "b")
    bench.publish(0)
    (first,), (second,) = one.leases(), two.leases()
    one.release(first)
    one.release(second)  # not its own
    assert bench.owner.book.loan() is None
    two.release(second)
    assert bench.owner.book.loan() == 0


def test_skip_drops_late_rows_of_its_group_and_never_a_leased_one() -> None:
    groups = make_groups("late", policy="skip", group_timeout_seconds=0.3) | make_groups("main")
    bench = Bench(groups=groups)
    late = bench.worker("one", "late", capacity=1)
    bench.publish(0, 1)
    (lease,) = late.leases()
    bench.wait(0.4)
    assert bench.accounts("late")["skipped"] == 1
    assert bench.accounts("main")["skipped"] == 0
    late.release(lease)
    assert bench.accounts("late")["released"] == 1
    assert not bench.owner.ledgers["late"].lacks(1)


def test_wait_keeps_rows_for_a_group_without_a_worker() -> None:
    bench = Bench(num_slots=1, groups=make_groups("main", group_timeout_seconds=0.3))
    bench.publish(0)
    bench.wait(5.0)
    assert bench.accounts()["skipped"] == 0
    assert bench.owner.book.loan() is None


def test_a_message_of_any_size_of_numbers_is_survived() -> None:
    bench = Bench()
    worker = bench.worker()
    bench.publish(0)
    huge = (1 << 64) - 1
    ref = LeaseRef(slot=huge, generation=huge, lease_id=huge)
    worker.release(ref, number=huge, capacity=huge)
    worker.nack(ref)
    worker.beat(ref, consumed=SequenceSet(low=huge), committed=SequenceSet(low=huge))
    worker.say(Release, lease=ref, ring_epoch=huge, session=huge)
    bench.publish(1, 2)
    bench.wait(0.2)
    assert bench.accounts()["published"] == 3
