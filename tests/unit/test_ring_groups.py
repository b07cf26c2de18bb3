"""Groups of a ring: who is away, who holds the target up, who goes on without its rows."""

import pytest

from common.config.shared import GroupTable
from common.contracts.ring_messages import Refused
from common.contracts.sequences import Shard
from tests.rings import Bench, Worker, make_groups, sequences

DETACHING = {"main": GroupTable(), "away": GroupTable(detach_after_seconds=2.0)}


def absent(bench: Bench) -> dict[str, tuple[float, int, bool, bool]]:
    return {
        report.group: (
            round(report.absent_seconds, 1),
            report.num_waiting,
            report.is_blocking,
            report.is_detached,
        )
        for report in bench.owner.policies.absent(bench.now)
    }


def stay(bench: Bench, worker: Worker, seconds: float) -> None:
    """Let time pass while a worker gives signs of life."""
    for _ in range(round(seconds / 0.1)):
        worker.beat()
        bench.wait(0.1)


def test_a_group_without_a_worker_is_named_with_its_rows_and_for_how_long() -> None:
    bench = Bench(num_slots=2, groups=make_groups("main", "away"))
    main = bench.worker()
    bench.wait(0.1)
    bench.publish(0)
    assert absent(bench) == {"away": (0.0, 1, False, False)}
    bench.wait(0.5)
    main.beat(*main.leases())
    bench.publish(1)
    assert absent(bench) == {"away": (0.5, 2, True, False)}, "the ring is full now"


def test_a_group_is_absent_from_the_end_of_its_last_session_on() -> None:
    bench = Bench()
    worker, other = bench.worker("one"), bench.worker("two")
    bench.wait(0.4)
    other.bye()
    worker.beat()
    bench.wait(0.1)
    bench.publish(0)
    assert absent(bench) == {}
    (lease,) = worker.leases()
    worker.nack(lease)
    worker.bye()
    bench.wait(0.1)
    assert absent(bench) == {"main": (0.0, 1, False, False)}
    bench.wait(0.4)
    assert absent(bench) == {"main": (0.4, 1, False, False)}
    bench.worker("three")
    assert absent(bench) == {}


def test_wait_never_detaches_a_group_unless_a_setting_says_so() -> None:
    bench = Bench(num_slots=1, groups=make_groups("main", "away"))
    bench.worker()
    bench.publish(0)
    bench.wait(600.0)
    assert bench.accounts("away")["skipped"] == 0
    assert bench.owner.book.loan() is None


def test_a_detached_group_frees_the_ring_and_its_rows_count_as_skipped() -> None:
    bench = Bench(num_slots=2, groups=DETACHING)
    main = bench.worker()
    bench.publish(0, 1)
    for lease in main.leases():
        main.release(lease)
    assert bench.owner.book.loan() is None
    stay(bench, main, 1.9)
    assert bench.accounts("away")["skipped"] == 0
    stay(bench, main, 0.3)
    assert bench.accounts("away")["skipped"] == 2
    assert bench.owner.book.slot_counts()["free"] == 2
    assert absent(bench) == {"away": (2.1, 0, False, True)}
    bench.publish(2)  # to the other group alone
    assert [delivery.row.sequence for delivery in bench.owner.book.leases()] == [2]
    assert (bench.accounts("away")["published"], bench.accounts("away")["skipped"]) == (3, 3)
    assert bench.owner.ledgers["away"].settled_below == 3
    assert not bench.owner.wants(2)


def test_a_row_that_only_a_detached_group_lacks_is_not_made() -> None:
    """As after a restart, where the group that is there has trained far ahead."""
    bench = Bench(groups=DETACHING, settled={"main": sequences(low=5)})
    main = bench.worker()
    assert bench.owner.wants(0)
    stay(bench, main, 2.5)
    assert [sequence for sequence in range(7) if bench.owner.wants(sequence)] == [5, 6]
    assert bench.accounts("away")["skipped"] == 7
    assert bench.owner.ledgers["away"].settled_below == 7


def test_a_detached_group_gets_rows_again_with_its_next_worker() -> None:
    bench = Bench(groups=DETACHING)
    main = bench.worker()
    stay(bench, main, 2.5)
    bench.publish(0)
    back = bench.worker("two", "away")
    assert absent(bench) == {}
    bench.publish(1)
    assert [lease.slot for lease in back.leases()] == [1]
    assert bench.accounts("away")["skipped"] == 1


def test_rows_that_a_detached_group_s_dead_worker_held_are_not_made_again() -> None:
    bench = Bench(groups=DETACHING, session_timeout_seconds=0.5, resume_wait_seconds=0.2)
    main, gone = bench.worker(), bench.worker("two", "away")
    bench.publish(0)
    (lease,) = gone.leases()
    gone.release(lease)
    for lease in main.leases():
        main.release(lease)
    stay(bench, main, 3.2)
    assert bench.recaptures() == []
    counts = bench.accounts("away")
    assert (counts["released"], counts["skipped"]) == (1, 1)
    assert bench.owner.ledgers["away"].is_clear()
    assert bench.owner.ledgers["away"].counts["recaptured"] == 1  # published twice, one row


@pytest.mark.parametrize("others", [{}, {"other": GroupTable(detach_after_seconds=2.0)}])
def test_rows_are_not_spent_where_nobody_is_served(others: dict[str, GroupTable]) -> None:
    bench = Bench(groups={"away": GroupTable(detach_after_seconds=2.0), **others})
    bench.publish(0)
    bench.wait(60.0)
    assert bench.accounts("away")["skipped"] == 0


def test_a_group_that_is_done_with_every_row_has_been_served() -> None:
    bench = Bench(groups=DETACHING)
    main = bench.worker()
    bench.publish(0)
    bench.owner.end(0)
    for lease in main.leases():
        main.release(lease)
    main.beat(consumed=sequences(low=1), committed=sequences(low=1))
    main.bye(committed=sequences(low=1))
    bench.wait(1.0)
    assert not bench.owner.is_drained()
    bench.wait(1.5)
    assert bench.accounts("away")["skipped"] == 1
    assert bench.owner.is_drained()


def test_an_owner_that_was_stopped_itself_detaches_nobody_for_it() -> None:
    bench = Bench(groups=DETACHING)
    bench.worker()
    bench.publish(0)
    bench.wait(0.5)
    bench.now += 30.0
    bench.owner.postpone(30.0)
    bench.wait(0.2)
    assert absent(bench)["away"][3] is False


def test_a_worker_that_counts_rings_otherwise_is_refused_before_its_sets_are_believed() -> None:
    bench = Bench()
    worker = bench.worker(shard=Shard(index=0, count=2), consumed=sequences(low=9))
    (refused,) = worker.told(Refused)
    assert refused.kind == "other_shard"
    assert "0 of 1" in refused.reason
    assert "0 of 2" in refused.reason
    assert bench.owner.wants(0)


def test_a_group_that_has_made_all_its_steps_holds_nobody_up() -> None:
    bench = Bench(num_slots=2, groups=make_groups("main", "short"))
    main, short = bench.worker(), bench.worker("s", group="short")
    bench.publish(0, 1)
    for lease in main.leases():
        main.release(lease)
    short.release(short.leases()[0])
    short.bye(is_finished=True, committed=sequences(low=1))
    assert bench.owner.book.slot_counts()["free"] == 1
    stay(bench, main, 0.2)
    assert bench.owner.book.slot_counts()["free"] == 2
    bench.publish(2)
    assert (bench.accounts("short")["published"], bench.accounts("short")["skipped"]) == (3, 2)
    assert bench.accounts("main")["skipped"] == 0
    bench.worker("s2", group="short")
    bench.publish(3)
    assert bench.accounts("short")["skipped"] == 2, "a worker that comes gets rows again"


@pytest.mark.parametrize("other_finishes_last", [False, True])
def test_a_group_is_at_its_end_with_its_last_worker_alone(other_finishes_last: bool) -> None:
    bench = Bench(num_slots=1, groups=make_groups("main", "short"))
    main = bench.worker()
    first, second = bench.worker("a", group="short"), bench.worker("b", group="short")
    bench.publish(0)
    for lease in main.leases():
        main.release(lease)
    first.bye(is_finished=True)
    second.bye(is_finished=other_finishes_last)
    stay(bench, main, 0.2)
    assert (bench.accounts("short")["skipped"] == 1) == other_finishes_last


def test_rows_are_not_spent_where_every_group_has_made_its_steps() -> None:
    bench = Bench(num_slots=1, groups=make_groups("main", "short"))
    workers = bench.worker(), bench.worker("s", group="short")
    bench.publish(0)
    for worker in workers:
        worker.bye(is_finished=True)
    bench.wait(1.0)
    assert bench.accounts("main")["skipped"] == bench.accounts("short")["skipped"] == 0
    assert bench.owner.book.loan() is None
