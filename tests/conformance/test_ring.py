"""One suite over every ring: every kind of memory, in one process and across two (conftest)."""

import os
import threading
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from common.contracts.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from common.contracts.rows import DocumentSpan
from common.contracts.sequences import SequenceSet
from common.errors import (
    ConfigError,
    CorruptSlotError,
    LayoutMismatchError,
    SegmentError,
    SlotStateError,
    StaleEpochError,
)
from common.ring.owner import RingOwner
from tests.conformance.conftest import Rings, rings_in
from tests.rings import (
    make_schema,
    publish,
    segments_of,
    wait_until,
    write_row,
)

SHORT = {"lease_seconds": 0.5, "lease_max_seconds": 0.5}


def accounts(owner: RingOwner, group: str = "main") -> Any:
    return next(account for account in owner.report().groups if account.group == group)


def test_every_row_arrives_once_over_two_readers_and_as_it_was_written(rings: Rings) -> None:
    owner, readers = rings.owner(), [rings.reader("one"), rings.reader("two")]
    arrived: Counter[int | None] = Counter()

    def produce() -> None:
        for sequence in range(40):
            publish(owner, sequence)
        owner.end(39)

    producer = threading.Thread(target=produce)
    producer.start()
    while not all(reader.state()[0] for reader in readers):
        arrived.update(reader.next_row(timeout=0.02) for reader in readers)
    producer.join()
    del arrived[None]
    assert arrived == Counter(range(40))
    wait_until(lambda: accounts(owner).released == 40, "every row is released")
    assert accounts(owner).requeued == 0


def test_the_stream_is_drained_once_every_row_is_committed(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    for sequence in range(3):
        publish(owner, sequence)
    owner.end(2)
    assert [reader.next_row() for _ in range(3)] == [0, 1, 2]
    assert not reader.state()[1]
    reader.commit()
    wait_until(lambda: reader.state()[1], "the reader hears that the stream is drained")
    assert reader.state()[2] == SequenceSet(low=3)
    assert not owner.is_drained()  # the reader has not said goodbye
    reader.close()
    wait_until(owner.is_drained, "the owner hears the goodbye")
    assert owner.settled_below() == 3


def test_a_row_tells_its_split_tokens_and_documents(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    spans = (DocumentSpan(sample_id=9, tag=1, start=0, length=5), DocumentSpan(sample_id=8, tag=2, start=5, length=6))  # fmt: skip
    with owner.loan(5.0) or pytest.fail("no slot") as slot:
        slot.publish(sequence=0, split="held_out", used_tokens=11, documents=spans)
    assert reader.take() == 0
    told = reader.descriptor(0)
    assert (told.split, told.used_tokens, told.attempt) == ("held_out", 11, 0)
    assert reader.documents(0) == spans


def test_a_full_ring_lends_nothing_until_a_release(rings: Rings) -> None:
    owner, reader = rings.owner(num_slots=2), rings.reader()
    publish(owner, 0)
    publish(owner, 1)
    assert owner.loan(0.05) is None
    assert reader.take() == 0
    reader.release(0)
    with owner.loan(60.0) or pytest.fail("no slot"):
        assert owner.report().slots == {"free": 0, "writing": 1, "published": 1}


def test_a_row_that_nobody_lacks_frees_its_slot_for_who_waits(rings: Rings) -> None:
    owner = rings.owner(num_slots=1, settled={"main": SequenceSet(low=1)}, resume_wait_seconds=0.01)
    slot = owner.loan(5.0) or pytest.fail("no slot")
    publisher = threading.Timer(0.2, write_row, [slot, owner.layout, 0])
    publisher.start()
    assert owner.loan(600.0) is not None
    publisher.join()
    assert accounts(owner).published == 0


def test_an_exception_while_writing_frees_the_slot(rings: Rings) -> None:
    owner = rings.owner(num_slots=1)
    with pytest.raises(ZeroDivisionError), owner.loan(5.0) or pytest.fail("no slot"):
        _ = 1 / 0
    assert owner.report().slots["free"] == 1


BAD_ROWS = {
    "sequence": {"sequence": -1}, "tokens": {"used_tokens": 129}, "kind": {"used_tokens": 1.0},
    "split": {"split": "test"}, "documents": {"documents": (DocumentSpan(sample_id=0, tag=0, start=0, length=0),) * 5},
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_row_that_cannot_be_published_frees_its_slot(rings: Rings, bad: str) -> None:
    owner = rings.owner(num_slots=1)
    fields: dict = {
        "sequence": 0,
        "split": "train",
        "used_tokens": 1,
        "documents": (),
        **BAD_ROWS[bad],
    }
    slot = owner.loan(5.0) or pytest.fail("no slot")
    with pytest.raises((CorruptSlotError, ValueError)):
        slot.publish(**fields)
    assert owner.report().slots["free"] == 1
    publish(owner, 0)
    assert accounts(owner).published == 1


def test_a_slot_is_published_once(rings: Rings) -> None:
    owner = rings.owner()
    with owner.loan(5.0) or pytest.fail("no slot") as slot:
        slot.publish(sequence=0, split="train", used_tokens=1, documents=())
        with pytest.raises(SlotStateError, match="loan another"):
            slot.publish(sequence=1, split="train", used_tokens=1, documents=())
    assert owner.report().slots["published"] == 1


def test_a_slot_rewritten_under_an_expired_lease_fails_the_check_after_the_copy(
    rings: Rings,
) -> None:
    owner = rings.owner(num_slots=1, **SHORT, max_attempts=1)
    reader = rings.reader(capacity=1)
    publish(owner, 0)
    assert reader.take() == 0
    copied = reader.copy(0)
    assert reader.is_intact(0, copied)
    slot = owner.loan(60.0)  # the lease expires, the row is poison, the slot is written again
    assert slot is not None
    assert not reader.is_intact(0, copied)
    write_row(slot, owner.layout, 0)
    assert not reader.is_intact(0, copied)
    assert not reader.is_payload_intact(0)
    reader.nack(0, "torn")
    wait_until(lambda: owner.report().stale_calls.get("nack") == 1, "the nack is counted")


def test_a_copy_with_other_tokens_than_were_published_is_not_intact(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    publish(owner, 0)
    assert reader.take() == 0
    copied = reader.copy(0)
    assert not reader.is_intact(0, copied[:-1] + b"\xff")


def test_a_checksum_covers_every_byte_of_the_payload(rings: Rings) -> None:
    if rings.gpu is not None:
        with pytest.raises(ConfigError, match="checksum_payload"):
            rings.owner(checksum_payload=True)
        return
    owner = rings.owner(num_slots=1, checksum_payload=True)
    reader = rings.reader()
    publish(owner, 0)
    assert reader.take() == 0
    assert reader.is_payload_intact(0)
    owner._segment.slot(0).view[-1] ^= 1
    assert not reader.is_payload_intact(0)
    assert reader.is_intact(0, reader.copy(0))


def test_a_late_release_is_a_counted_no_op_and_the_row_goes_again(rings: Rings) -> None:
    owner = rings.owner(**SHORT)
    reader = rings.reader()
    publish(owner, 0)
    assert reader.take() == 0
    wait_until(lambda: owner.report().reclaimed.get("expired") == 1, "the lease expires")
    reader.release(0)
    wait_until(lambda: owner.report().stale_calls.get("release") == 1, "the release is counted")
    reader.train(0)
    assert reader.take() == 0
    assert reader.descriptor(0).attempt == 1
    reader.release(0)
    wait_until(lambda: accounts(owner).released == 1, "the row is released")


def test_releasing_twice_releases_once(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    publish(owner, 0)
    assert reader.take() == 0
    for _ in range(3):
        reader.release(0)
    reader.nack(0)
    reader.train(0)
    publish(owner, 1)
    publish(owner, 2)
    assert {reader.take(), reader.take()} == {1, 2}
    assert owner.report().stale_calls.get("release", 0) == 0


def test_a_row_that_is_given_back_goes_again_until_it_is_poison(rings: Rings) -> None:
    owner = rings.owner(num_slots=1, max_attempts=3)
    reader = rings.reader()
    publish(owner, 0)
    for attempt in range(3):
        assert reader.take() == 0
        assert reader.descriptor(0).attempt == attempt
        reader.nack(0)
    wait_until(lambda: accounts(owner).poison == 1, "the row is poison")
    assert owner.report().slots["free"] == 1


def test_a_reader_gets_no_more_rows_than_it_has_buffers(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader(capacity=2)
    for sequence in range(4):
        publish(owner, sequence)
    for sequence in range(2):
        assert reader.take() == sequence
        reader.release(sequence)
    assert reader.take(timeout=0.3) is None
    assert accounts(owner).in_ring == 2
    reader.train(0)
    assert reader.take() == 2
    assert reader.take(timeout=0.3) is None


def test_a_reader_that_leaves_gives_its_rows_back_at_once_and_at_no_cost(rings: Rings) -> None:
    owner, leaver = rings.owner(), rings.reader("leaver")
    for sequence in range(3):
        publish(owner, sequence)
    assert leaver.take() == 0
    leaver.release(0)
    assert leaver.take() == 1
    leaver.close()
    wait_until(lambda: owner.next_recapture() == 0, "what it had released is captured again")
    publish(owner, 0)
    heir = rings.reader("heir", capacity=3)
    assert {heir.take() for _ in range(3)} == {0, 1, 2}
    assert accounts(owner).requeued == 0
    assert accounts(owner).recaptured == 1


def test_every_group_gets_every_row(rings: Rings) -> None:
    owner = rings.owner("a", "b")
    readers = [rings.reader("one", "a"), rings.reader("two", "b")]
    for sequence in range(6):
        publish(owner, sequence)
        assert [reader.next_row() for reader in readers] == [sequence, sequence]
    for group in ("a", "b"):
        wait_until(lambda group=group: accounts(owner, group).released == 6, f"{group} has all six")


GARBAGE = {
    "noise": ([os.urandom(50)], "malformed"),
    "empty": ([b""], "malformed"),
    "many parts": ([b"a", b"b", b"c"], "malformed"),
    "version": ([msgpack.packb((PROTOCOL_VERSION + 1, "Hello", {}))], "wrong_version"),
    "type": ([msgpack.packb((PROTOCOL_VERSION, "Welcome", {}))], "unknown_type"),
    "fields": ([msgpack.packb((PROTOCOL_VERSION, "Hello", {"session": "x"}))], "malformed"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_on_the_socket_is_counted_and_survived(rings: Rings, kind: str) -> None:
    owner, reader = rings.owner(), rings.reader()
    parts, reason = GARBAGE[kind]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{rings.endpoint}")
        for _ in range(10):
            socket.send_multipart(parts)
        wait_until(lambda: owner.report().refused_messages.get(reason) == 10, f"10 {reason}")
    publish(owner, 0)
    assert reader.next_row() == 0


def test_a_message_over_the_limit_is_counted_and_one_far_over_costs_its_sender_the_connection(
    rings: Rings,
) -> None:
    owner, reader = rings.owner(), rings.reader()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{rings.endpoint}")
        for num_bytes in (MAX_MESSAGE_BYTES + 1, 1):
            socket.send(bytes(num_bytes))
        counts = {"oversized": 1, "malformed": 1}
        wait_until(lambda: owner.report().refused_messages == counts, "both came, over one line")
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.send(bytes(4 * MAX_MESSAGE_BYTES + 1))
        wait_until(lambda: monitor.poll(0) or owner.report().refused_messages != counts, "it ends")
        assert monitor.poll(0), "it was received"
        socket.disable_monitor()
        monitor.close(linger=0)
        publish(owner, 0)
        assert reader.next_row() == 0


def test_a_reader_of_an_unknown_group_hears_which_groups_there_are(rings: Rings) -> None:
    rings.owner("a")
    reader = rings.reader(group="b")
    with pytest.raises(ConfigError, match="known: \\['a'\\]"):
        reader.take()


def test_the_socket_is_private_and_its_file_goes_with_its_owner(rings: Rings) -> None:
    owner = rings.owner()
    assert rings.endpoint.stat().st_mode & 0o777 == 0o600
    owner.close()
    owner.close()
    assert not rings.endpoint.exists()


def test_an_owner_that_closes_late_leaves_its_successor_s_socket(rings: Rings) -> None:
    old, reader = rings.owner(), rings.reader()
    publish(old, 0)
    assert reader.next_row() == 0
    new = rings.owner(resume_wait_seconds=0.0)
    old.close()
    assert rings.endpoint.exists()
    publish(new, 1)
    assert reader.next_row() == 1


def test_a_closed_ring_takes_no_rows(rings: Rings) -> None:
    owner = rings.owner()
    slot = owner.loan(5.0) or pytest.fail("no slot")
    owner.close()
    with pytest.raises(StaleEpochError):
        slot.publish(sequence=0, split="train", used_tokens=1, documents=())
    with pytest.raises(StaleEpochError):
        owner.loan(0.0)


def test_closing_wakes_whoever_waits_for_a_slot(rings: Rings) -> None:
    owner = rings.owner(num_slots=1)
    publish(owner, 0)
    waiter = threading.Timer(0.2, owner.close)
    waiter.start()
    with pytest.raises(StaleEpochError):
        owner.loan(60.0)
    waiter.join()


def test_a_reader_goes_on_with_the_owner_s_successor_and_keeps_what_it_has_trained(
    rings: Rings,
) -> None:
    owner, reader = rings.owner(), rings.reader(capacity=4)
    for sequence in range(3):
        publish(owner, sequence)
    assert [reader.next_row(), reader.next_row()] == [0, 1]
    reader.commit()
    assert reader.take() == 2
    assert reader.release(2)  # staged, and in no step yet
    owner.close()
    successor = rings.owner(settled={"main": SequenceSet(low=1)})
    fresh = successor.loan(60.0)  # waits for what live workers say they hold
    assert fresh is not None
    fresh.abort()
    assert [sequence for sequence in range(5) if successor.wants(sequence)] == [3, 4]
    publish(successor, 3)
    assert reader.take() == 3
    assert reader.is_intact(3, reader.copy(3))
    reader.release(3)
    reader.train(2)
    reader.train(3)
    reader.commit()
    wait_until(lambda: successor.settled_below() == 4, "all four rows are committed")


def test_a_copy_that_outlives_its_owner_is_void_and_its_row_is_trained_once(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    publish(owner, 0)
    assert reader.take() == 0
    owner.close()
    wait_until(lambda: not reader.has_ring(), "the reader sees that the ring is gone")
    assert not reader.release(0)
    successor = rings.owner()
    publish(successor, 0)
    assert reader.next_row() == 0
    reader.commit()
    wait_until(lambda: successor.settled_below() == 1, "it is committed")


def test_who_comes_late_to_a_new_owner_is_not_given_what_it_has(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    publish(owner, 0)
    assert reader.next_row() == 0
    owner.close()
    successor = rings.owner(resume_wait_seconds=0.0)
    for sequence in range(2):
        publish(successor, sequence)
    assert reader.next_row() == 1
    reader.commit()
    wait_until(lambda: successor.settled_below() == 2, "both are committed")


def test_an_owner_with_other_rows_is_refused_by_a_reader_that_has_buffers(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    publish(owner, 0)
    assert reader.next_row() == 0
    owner.close()
    rings.owner(schema=make_schema(row_tokens=256))
    with pytest.raises(LayoutMismatchError, match="restart the workers") as raised:
        reader.take()
    assert "schema: row_tokens got 256, expected 128; the target" in str(raised.value)


def test_a_reader_that_comes_before_its_owner_waits_for_it(rings: Rings) -> None:
    reader = rings.reader()
    assert reader.take(timeout=0.3) is None
    owner = rings.owner()
    publish(owner, 0)
    assert reader.next_row() == 0


def test_leases_that_nobody_acquired_end_with_their_ring(rings: Rings) -> None:
    owner, reader = rings.owner(), rings.reader()
    publish(owner, 0)
    publish(owner, 1)
    assert reader.take() == 0
    owner.close()
    wait_until(lambda: not reader.has_ring(), "the reader sees that the ring is gone")
    assert reader.take(timeout=0.0) is None


def test_memory_of_an_owner_that_is_gone_is_given_back_by_its_readers() -> None:
    with rings_in("host") as rings:
        owner, reader = rings.owner(), rings.reader()
        publish(owner, 0)
        assert reader.next_row() == 0
        assert segments_of(rings.run)[0] in Path("/proc/self/maps").read_text()
        owner.close()
        reader._leases.clear()
        maps = Path("/proc/self/maps")
        wait_until(lambda: rings.run not in maps.read_text(), "the reader lets it go")


def test_a_memory_ring_cannot_be_read_from_another_process(other_process: Connection) -> None:
    with rings_in("memory", other_process) as rings:
        rings.owner()
        reader = rings.reader()
        with pytest.raises(SegmentError, match="not of this process"):
            reader.take()


def test_closing_wakes_whoever_waits_for_a_row() -> None:
    with rings_in("memory") as rings:
        reader = rings.reader()
        closer = threading.Timer(0.2, reader.close)
        closer.start()
        assert reader.take(timeout=100.0) is None
        closer.join()
