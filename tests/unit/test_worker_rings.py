"""One worker at several rings: fair, and held up by none of them."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.contracts.ring_messages import LeaseRef
from common.contracts.rows import RowSchema
from common.contracts.sequences import SequenceSet, shards_of
from common.errors import ConfigError, LayoutMismatchError
from common.ring.lease import Lease
from common.ring.owner import RingOwner
from common.ring.segment import MemorySegment
from common.ring.worker_rings import WorkerRings
from services.drafter_worker.meter import Meter, Progress
from tests.rings import make_groups, make_schema, make_table, publish, wait_until

OpenTarget = Callable[..., RingOwner]
Connect = Callable[..., WorkerRings]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[OpenTarget]:
    opened: list[RingOwner] = []

    def target(
        index: int, count: int = 2, schema: RowSchema | None = None, **named: object
    ) -> RingOwner:
        opened.append(RingOwner(
            endpoint=tmp_path / f"target-{index}.sock", run="rings", schema=schema or make_schema(),
            table=make_table(num_slots=8), groups=make_groups(), shard=shards_of(count)[index],
            backing=MemorySegment, **named,
        ))  # fmt: skip
        return opened[-1]

    yield target
    for owner in opened:
        owner.close()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    opened: list[WorkerRings] = []

    def connect(count: int = 2, **named: object) -> WorkerRings:
        endpoints = [tmp_path / f"target-{index}.sock" for index in range(count)]
        opened.append(
            WorkerRings(endpoints, worker_id="w", group="main", **{"capacity": 2, **named})
        )
        return opened[-1]

    yield connect
    for rings in opened:
        rings.close()


def take(rings: WorkerRings, timeout: float = 60.0) -> Lease:
    lease = rings.acquire(timeout)
    assert lease is not None, "no row came"
    return lease


def train(rings: WorkerRings, lease: Lease) -> int:
    """Go all the way with one row and return its sequence."""
    lease.release()
    rings.mark_consumed({lease.sequence})
    rings.return_buffer(lease.sequence)
    return lease.sequence


def num_waiting(rings: WorkerRings) -> list[int]:
    return [len(ring._waiting) for ring in rings.rings]


def test_rows_of_all_rings_come_under_their_sequences_in_the_run(
    target: OpenTarget, connect: Connect
) -> None:
    owners, rings = [target(0), target(1)], connect()
    for sequence in range(12):
        publish(owners[sequence % 2], sequence)
    assert Counter(train(rings, take(rings)) for _ in range(12)) == Counter(range(12))
    assert rings.consumed == SequenceSet(low=12)


def test_rings_with_rows_take_turns(target: OpenTarget, connect: Connect) -> None:
    owners, rings = [target(index, 3) for index in range(3)], connect(3)
    for sequence in range(18):
        publish(owners[sequence % 3], sequence)
    order = []
    for _ in range(18):
        wait_until(lambda: all(num_waiting(rings)) or len(order) >= 12, "each ring has a row here")
        order.append(train(rings, take(rings)) % 3)
    turns = [order[start : start + 3] for start in range(0, 12, 3)]
    assert [sorted(turn) for turn in turns] == [[0, 1, 2]] * 4


def test_a_ring_with_a_single_row_is_not_passed_over_by_a_busy_one(
    target: OpenTarget, connect: Connect
) -> None:
    busy, rare = target(0), target(1)
    rings = connect()
    for sequence in range(0, 12, 2):
        publish(busy, sequence)
    wait_until(lambda: num_waiting(rings)[0] == 2, "the busy ring has rows here")
    publish(rare, 1)
    wait_until(lambda: num_waiting(rings)[1] == 1, "and so has the other")
    assert 1 in [train(rings, take(rings)) for _ in range(2)]


def test_a_target_that_never_comes_holds_nobody_up(target: OpenTarget, connect: Connect) -> None:
    owner, rings = target(1), connect()
    for sequence in range(1, 9, 2):
        publish(owner, sequence)
    assert [train(rings, take(rings)) for _ in range(4)] == [1, 3, 5, 7]
    assert not rings.is_settled


def test_a_wait_for_a_row_ends_with_the_first_ring_that_has_one(
    target: OpenTarget, connect: Connect
) -> None:
    owners, rings = [target(index, 3) for index in range(3)], connect(3)
    assert rings.schema(60.0) is not None
    for sequence in (2, 0, 1):
        timer = threading.Timer(0.2, publish, (owners[sequence], sequence))
        timer.start()
        lease = take(rings)
        assert lease.sequence == sequence
        train(rings, lease)
        timer.join()


def test_each_ring_may_fill_its_buffers_and_no_more_whatever_the_others_do(
    target: OpenTarget, connect: Connect
) -> None:
    """A worker has `capacity` buffers for each ring: no lease comes without one (R4)."""
    owners, rings = [target(0), target(1)], connect(capacity=2)
    for sequence in range(8):
        publish(owners[sequence % 2], sequence)
    held = [take(rings) for _ in range(rings.num_buffers)]
    assert sorted(lease.sequence for lease in held) == [0, 1, 2, 3]
    for lease in held:
        lease.release()
    assert rings.acquire(0.3) is None
    assert [owner.report().slots["published"] for owner in owners] == [2, 2]
    rings.return_buffer(1)
    assert take(rings).sequence == 5
    assert rings.acquire(0.3) is None, "the buffer was of the other ring"


def test_a_restarted_target_costs_the_other_rings_nothing(
    target: OpenTarget, connect: Connect
) -> None:
    first, second = target(0), target(1)
    rings = connect()
    publish(first, 0)
    publish(second, 1)
    assert {train(rings, take(rings)) for _ in range(2)} == {0, 1}
    held_session = rings.rings[1]._protocol.session
    first.close()
    successor = target(0, settled={"main": SequenceSet()})
    publish(second, 3)
    assert train(rings, take(rings)) == 3
    wait_until(lambda: not successor.wants(0), "its successor hears what the worker has")
    publish(successor, 2)
    assert train(rings, take(rings)) == 2
    assert rings.rings[1]._protocol.session == held_session
    assert second.report().stale_calls["held"] == 0


def test_a_worker_is_drained_when_every_ring_is(target: OpenTarget, connect: Connect) -> None:
    owners, rings = [target(0), target(1)], connect()
    for sequence in (0, 1, 2):
        publish(owners[sequence % 2], sequence)
        train(rings, take(rings))
    owners[0].end(2)
    wait_until(lambda: rings.rings[0].is_settled, "the first ring is settled")
    assert not rings.is_settled
    rings.mark_committed()
    wait_until(lambda: rings.rings[0].is_drained, "the first ring is drained")
    assert not rings.is_drained
    publish(owners[1], 3)
    train(rings, take(rings))
    owners[1].end(3)
    wait_until(lambda: rings.is_settled, "both rings are settled")
    assert not rings.is_drained
    rings.mark_committed()
    wait_until(lambda: rings.is_drained, "both rings are drained")
    rings.close()
    wait_until(lambda: all(owner.is_drained() for owner in owners), "both hear the goodbye")


def test_a_ring_that_carries_no_row_of_a_short_run_is_drained_too(
    target: OpenTarget, connect: Connect
) -> None:
    owners, rings = [target(0), target(1)], connect()
    publish(owners[0], 0)
    train(rings, take(rings))
    owners[0].end(0)
    owners[1].end(-1)
    rings.mark_committed()
    wait_until(lambda: rings.is_drained, "both rings are drained")


def test_a_worker_says_to_each_ring_what_its_checkpoint_has_of_it(
    target: OpenTarget, connect: Connect
) -> None:
    known = SequenceSet.of((7, 10, 13), low=5)
    first, second = target(0), target(1)
    rings = connect(consumed=known)
    assert rings.consumed == known
    wait_until(lambda: not first.wants(10), "the first ring has heard")
    wait_until(lambda: not second.wants(13), "the second ring has heard")
    wanted = [s for s in range(15) if (first, second)[s % 2].wants(s)]
    assert wanted == [5, 6, 8, 9, 11, 12, 14]


def test_an_owner_speaks_of_its_rows_by_their_sequences_in_the_run(
    target: OpenTarget, connect: Connect
) -> None:
    owner, rings = target(2, 3), connect(3)
    for sequence in (2, 5):
        publish(owner, sequence)
        train(rings, take(rings))
    rings.mark_committed()
    wait_until(lambda: owner.settled_below() == 8, "two rows are committed")
    publish(owner, 8)
    take(rings).release()
    owner.end(8)
    pulses = rings.rings[2]._protocol
    wait_until(lambda: pulses._pulse.last_sequence == 2, "its third row is the last")
    rings.close()
    wait_until(lambda: owner.next_recapture() == 8, "what was not trained is to come again")
    assert not owner.wants(5)
    assert owner.wants(8)
    with pytest.raises(ValueError, match="row 9 is not of ring 2 of 3"):
        publish(owner, 9)


def test_an_owner_takes_its_part_of_what_the_run_s_checkpoints_hold(target: OpenTarget) -> None:
    owner = target(1, settled={"main": SequenceSet.of((6, 7, 10), low=4)})
    assert [sequence for sequence in range(1, 13, 2) if owner.wants(sequence)] == [5, 9, 11]
    assert owner.settled_below() == 5


def test_targets_with_unlike_rows_are_an_error_that_names_both(
    target: OpenTarget, connect: Connect
) -> None:
    owners, rings = [target(0), target(1, schema=make_schema(hidden_size=16))], connect()
    assert rings.schema(60.0) is not None
    publish(owners[0], 0)
    publish(owners[1], 1)
    with pytest.raises(LayoutMismatchError, match=r"target-[01].sock.*target-[01].sock") as raised:
        list(map(take, [rings, rings]))
    assert re.search("hidden_size got (8, expected 16|16, expected 8);", str(raised.value))
    assert "row_tokens" not in str(raised.value)


def test_a_worker_that_counts_targets_otherwise_is_told_the_setting(
    target: OpenTarget, connect: Connect
) -> None:
    target(0, 3)
    with pytest.raises(ConfigError, match=r"0 of 3.*0 of 2.*same target.replicas"):
        connect(2).acquire(60.0)


def test_closing_gives_every_ring_back_what_waits(target: OpenTarget, connect: Connect) -> None:
    owners, rings = [target(0), target(1)], connect()
    publish(owners[0], 0)
    publish(owners[1], 1)
    wait_until(lambda: num_waiting(rings) == [1, 1], "both rows are here")
    rings.close()
    for owner in owners:
        wait_until(lambda owner=owner: owner.report().deliveries["ready"] == 1, "it is given back")
        assert owner.report().groups[0].requeued == 0


def test_the_run_s_length_is_known_from_any_target(target: OpenTarget, connect: Connect) -> None:
    target(1, total_rows=99)
    rings = connect()
    assert rings.schema(60.0) == make_schema()
    assert rings.total_rows == 99


def test_an_owner_s_stall_does_not_delay_rows_of_another(
    target: OpenTarget, connect: Connect
) -> None:
    """The stalled owner's thread is kept from its lock; its ring has rows that it cannot announce."""
    stalled, live = target(0), target(1)
    rings = connect()
    assert rings.schema(60.0) is not None
    with stalled._lock:
        time.sleep(0.2)
        for sequence in (1, 3, 5):
            publish(live, sequence)
            assert train(rings, take(rings)) == sequence


def test_messages_that_a_worker_refuses_are_counted_over_all_its_rings(
    target: OpenTarget, connect: Connect
) -> None:
    owners, rings = [target(0), target(1)], connect()
    for owner in owners:
        wait_until(lambda owner=owner: len(owner._protocol.sessions) == 1, "the worker is welcomed")
        (session,) = owner._protocol.sessions.of_group("main")
        nonsense = LeaseRef(slot=0, generation=0, lease_id=0)  # of a type that no worker hears
        with owner._lock:
            owner._protocol.outbox.append((session.identity, nonsense))
            owner._watch.nudge()
    wait_until(lambda: rings.refused_messages == Counter(unknown_type=2), "one of each is counted")
    meter = Meter("main", 0, "cpu", Progress())
    meter.refused_messages = dict(rings.refused_messages)
    assert meter.report().refused_messages == {"unknown_type": 2}
