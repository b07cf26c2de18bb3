"""A worker's side of the protocol: what it takes, what it tells, what survives a session."""

import pytest

from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.record import Record
from common.contracts.ring_messages import (
    Bye,
    Credit,
    Descriptor,
    Heartbeat,
    Hello,
    LeaseRef,
    Nack,
    Pulse,
    RefusalKind,
    Refused,
    Release,
    Welcome,
)
from common.contracts.sequences import SequenceSet
from common.errors import ConfigError, MessageError, RingError, SlotStateError
from common.ring.worker_protocol import WorkerProtocol
from tests.rings import EPOCH, make_schema, make_segment, sequences

SEGMENT = make_segment(4)


def worker(capacity: int = 2, consumed: SequenceSet | None = None) -> WorkerProtocol:
    return WorkerProtocol(worker_id="w", group="main", capacity=capacity, consumed=consumed)


def welcomed(capacity: int = 2, consumed: SequenceSet | None = None) -> WorkerProtocol:
    protocol = worker(capacity, consumed)
    welcome(protocol)
    return protocol


def welcome(protocol: WorkerProtocol, ring_epoch: int = EPOCH) -> None:
    protocol.welcome = Welcome(
        ring_epoch=ring_epoch, session=protocol.session, segment=SEGMENT, total_rows=None,
        row_schema=make_schema(), heartbeat_seconds=1.0, lease_seconds=1.0,
    )  # fmt: skip


def descriptor(
    protocol: WorkerProtocol, lease_id: int, sequence: int = 0, **changes: object
) -> Descriptor:
    values: dict = {
        "ring_epoch": EPOCH, "session": protocol.session, "sequence": sequence, "split": "train",
        "lease": LeaseRef(slot=0, generation=1, lease_id=lease_id), "attempt": 0,
        "used_tokens": 1, "num_bytes": 1, "token_hash": 1, **changes,
    }  # fmt: skip
    return Descriptor(**values)


def pulse(protocol: WorkerProtocol, number: int, **changes: object) -> Pulse:
    values: dict = {
        "ring_epoch": EPOCH, "session": protocol.session, "number": number, "settled_below": 0,
        "last_sequence": None, "is_settled": False, "is_drained": False, **changes,
    }  # fmt: skip
    return Pulse(**values)


def refused(protocol: WorkerProtocol, kind: RefusalKind) -> Refused:
    return Refused(ring_epoch=EPOCH, session=protocol.session, kind=kind, reason="why")


def last(protocol: WorkerProtocol) -> Record:
    return protocol.outbox[-1]


def test_a_descriptor_that_comes_twice_is_taken_once() -> None:
    protocol = welcomed()
    assert protocol.take(descriptor(protocol, 1))
    assert not protocol.take(descriptor(protocol, 1))
    assert protocol.num_held == 1


@pytest.mark.parametrize("reason", [None, "torn"])
def test_a_finished_lease_that_comes_again_gets_the_same_answer(reason: str | None) -> None:
    protocol = welcomed()
    told = descriptor(protocol, 1)
    protocol.take(told)
    protocol.finish(told, reason)  # type: ignore[arg-type]
    protocol.outbox.clear()
    assert not protocol.take(told)
    answer = last(protocol)
    assert isinstance(answer, Release if reason is None else Nack)
    assert answer.lease == told.lease


def test_a_descriptor_for_another_session_or_epoch_is_dropped() -> None:
    protocol = welcomed()
    assert not protocol.take(descriptor(protocol, 1, session=1))
    assert not protocol.take(descriptor(protocol, 1, ring_epoch=1))
    assert not protocol.outbox


def test_a_descriptor_without_a_free_buffer_is_dropped_unanswered() -> None:
    protocol = welcomed(capacity=1)
    told = descriptor(protocol, 1)
    protocol.take(told)
    assert not protocol.take(descriptor(protocol, 2))
    protocol.finish(told, None)
    protocol.outbox.clear()
    assert not protocol.take(descriptor(protocol, 2))
    assert not protocol.outbox
    protocol.return_buffer()
    assert protocol.take(descriptor(protocol, 2))


def test_a_slot_that_is_not_of_the_ring_is_malformed() -> None:
    protocol = welcomed()
    with pytest.raises(MessageError):
        protocol.take(descriptor(protocol, 1, lease=LeaseRef(slot=4, generation=1, lease_id=1)))


def test_capacity_counts_buffers_that_are_free_or_under_a_lease() -> None:
    protocol = welcomed(capacity=3)
    told = [descriptor(protocol, lease_id) for lease_id in (1, 2)]
    for each in told:
        protocol.take(each)
    protocol.beat()
    assert (beat := last(protocol))
    assert isinstance(beat, Heartbeat)
    assert beat.capacity == 3
    protocol.finish(told[0], None)
    release = last(protocol)
    assert isinstance(release, Release)
    assert release.capacity == 2
    protocol.finish(told[1], "stopping")
    nack = last(protocol)
    assert isinstance(nack, Nack)
    assert nack.capacity == 2


def test_numbers_rise_with_every_message_of_a_session() -> None:
    protocol = welcomed()
    protocol.hello()
    for _ in range(3):
        protocol.beat()
    assert [record.number for record in protocol.outbox] == [1, 2, 3, 4]  # type: ignore[attr-defined]


def test_an_answer_of_an_ended_session_touches_no_lease_of_this_one() -> None:
    """Lease ids begin at 1 in each ring_epoch."""
    protocol = welcomed()
    old = descriptor(protocol, 1, sequence=5)
    protocol.take(old)
    protocol.begin_session(num_acquired=1)
    welcome(protocol, ring_epoch=2)
    fresh = descriptor(protocol, 1, sequence=6, ring_epoch=2)
    assert protocol.take(fresh)
    assert not protocol.finish(old, None), "its row comes again from the new owner"
    assert protocol.num_held == 1
    assert not protocol.outbox
    assert not protocol.take(fresh)
    assert not protocol.outbox  # it is held, not finished


def test_a_copy_of_an_ended_session_occupies_its_buffer() -> None:
    protocol = welcomed(capacity=1)
    old = descriptor(protocol, 1)
    protocol.take(old)
    protocol.begin_session(num_acquired=1)
    welcome(protocol)
    assert not protocol.take(descriptor(protocol, 2))
    protocol.finish(old, "torn")
    assert protocol.take(descriptor(protocol, 2))


@pytest.mark.parametrize("num_held", [0, 1])
def test_a_returned_buffer_is_told_at_once_where_the_owner_knows_of_no_free_one(
    num_held: int,
) -> None:
    protocol = welcomed(capacity=1 + num_held)
    leases = [descriptor(protocol, lease_id, lease_id) for lease_id in range(1 + num_held)]
    for told in leases:
        protocol.take(told)
    protocol.finish(leases[0], None)
    released = last(protocol)
    assert isinstance(released, Release)
    assert released.capacity == num_held
    protocol.return_buffer()
    credit = last(protocol)
    assert isinstance(credit, Credit)
    assert (credit.session, credit.capacity) == (protocol.session, 1 + num_held)
    assert credit.number > released.number


def test_a_returned_buffer_is_told_with_the_next_message_where_the_owner_knows_of_a_free_one() -> (
    None
):
    protocol = welcomed(capacity=2)
    told = descriptor(protocol, 1)
    protocol.take(told)
    protocol.finish(told, None)
    protocol.outbox.clear()
    protocol.return_buffer()
    assert not protocol.outbox
    protocol.beat()
    beat = last(protocol)
    assert isinstance(beat, Heartbeat)
    assert beat.capacity == 2


def test_no_buffer_is_offered_before_the_segment_is_attached() -> None:
    """Else rows would be granted to a worker that may never read one."""
    protocol = worker(capacity=2)
    protocol.hello()
    hello = last(protocol)
    assert isinstance(hello, Hello)
    assert hello.capacity == 0
    welcome(protocol)
    protocol.beat()
    beat = last(protocol)
    assert isinstance(beat, Heartbeat)
    assert (beat.capacity, beat.number > hello.number) == (2, True)


def test_a_worker_that_cannot_attach_says_goodbye_to_who_has_welcomed_it() -> None:
    protocol = welcomed()
    unattached = protocol.welcome
    protocol.begin_session(num_acquired=0)
    protocol.bye(unattached)
    bye = last(protocol)
    assert isinstance(bye, Bye)
    assert (bye.ring_epoch, bye.session) == (EPOCH, protocol.session)


def test_a_buffer_that_is_returned_before_the_welcome_is_told_after_it() -> None:
    protocol = welcomed(capacity=1)
    told = descriptor(protocol, 1)
    protocol.take(told)
    protocol.finish(told, None)
    protocol.begin_session(num_acquired=0)
    protocol.return_buffer()
    assert not protocol.outbox
    welcome(protocol)
    protocol.beat()
    beat = last(protocol)
    assert isinstance(beat, Heartbeat)
    assert beat.capacity == 1


def test_a_buffer_that_nothing_filled_cannot_be_returned() -> None:
    protocol = welcomed()
    with pytest.raises(SlotStateError):
        protocol.return_buffer()


def test_hello_tells_what_is_trained_durable_and_staged() -> None:
    protocol = welcomed(capacity=4, consumed=sequences(5, low=3))
    for lease_id, sequence in ((1, 6), (2, 7)):
        told = descriptor(protocol, lease_id, sequence)
        protocol.take(told)
        protocol.finish(told, None)
    protocol.mark_consumed({6})
    protocol.begin_session(num_acquired=0)
    protocol.hello()
    hello = last(protocol)
    assert isinstance(hello, Hello)
    assert hello.consumed == sequences(5, 6, low=3)
    assert hello.committed == sequences(5, low=3)
    assert hello.staged == sequences(7)


def test_what_is_settled_is_forgotten_and_still_contained() -> None:
    protocol = welcomed(consumed=sequences(1, 3))
    protocol.hear(pulse(protocol, 1, settled_below=3))
    assert protocol.consumed == sequences(3, low=3)
    protocol.hear(pulse(protocol, 2, settled_below=2))
    assert protocol.consumed == sequences(3, low=3)


def test_an_older_pulse_changes_nothing() -> None:
    protocol = welcomed()
    protocol.hear(pulse(protocol, 2, is_settled=True))
    protocol.hear(pulse(protocol, 1))
    assert protocol.is_settled
    protocol.hear(pulse(protocol, 3, session=1))
    assert protocol.is_settled


def test_drained_stays_so_when_the_owner_goes() -> None:
    protocol = welcomed()
    protocol.hear(pulse(protocol, 1, is_settled=True, is_drained=True))
    protocol.begin_session(num_acquired=0)
    assert protocol.is_drained
    assert not protocol.is_settled
    welcome(protocol)
    protocol.hear(pulse(protocol, 1))
    assert protocol.is_drained


def test_a_heartbeat_fits_a_message_whatever_waits_for_a_commit() -> None:
    protocol = welcomed()
    protocol.mark_consumed(set(range(1 << 40, (1 << 40) + 400_000, 2)))
    protocol.mark_committed()
    protocol.hello()
    protocol.beat()
    assert all(len(encode(record)) < MAX_MESSAGE_BYTES for record in protocol.outbox)
    beat = last(protocol)
    assert isinstance(beat, Heartbeat)
    assert beat.consumed.above[0] == 1 << 40
    assert len(protocol.consumed.above) == 200_000


def test_nothing_is_said_to_an_owner_that_has_not_welcomed() -> None:
    protocol = worker()
    protocol.beat()
    protocol.bye()
    assert not protocol.outbox


def test_goodbye_tells_what_is_durable() -> None:
    protocol = welcomed()
    protocol.mark_consumed({0, 1})
    protocol.mark_committed()
    protocol.mark_consumed({2})
    protocol.bye()
    bye = last(protocol)
    assert isinstance(bye, Bye)
    assert bye.committed == SequenceSet(low=2)


def test_a_refusal_for_another_session_is_not_ours() -> None:
    protocol = welcomed()
    stranger = Refused(ring_epoch=EPOCH, session=1, kind="unknown_group", reason="")
    assert not protocol.is_refused(stranger)


@pytest.mark.parametrize("kind", ["unknown_session", "ended_session"])
def test_a_session_that_is_over_is_followed_by_a_fresh_one(kind: RefusalKind) -> None:
    protocol = welcomed()
    before = protocol.session
    assert protocol.is_refused(refused(protocol, kind))
    protocol.begin_session(num_acquired=0)
    assert protocol.session != before


def test_a_group_that_the_run_lacks_is_an_error_of_the_config() -> None:
    protocol = worker()
    with pytest.raises(ConfigError, match="why"):
        protocol.is_refused(refused(protocol, "unknown_group"))


def test_a_worker_whose_name_another_process_has_stops_the_second_time() -> None:
    protocol = welcomed()
    assert protocol.is_refused(refused(protocol, "replaced"))
    protocol.begin_session(num_acquired=0)
    with pytest.raises(RingError, match="one name"):
        protocol.is_refused(refused(protocol, "replaced"))
