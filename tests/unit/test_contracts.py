"""Records on the wire: they come back as they were, and nothing else gets in."""

import inspect
import typing
from types import ModuleType
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from common.contracts import control_messages, ring_messages, rows
from common.contracts.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Decoder, encode
from common.contracts.record import Record
from common.contracts.ring_messages import (
    OWNER_DECODER,
    WORKER_DECODER,
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
    SegmentRef,
    Welcome,
)
from common.contracts.sequences import SequenceSet, shards_of
from common.errors import MessageError
from tests.heartbeats import (
    beat,
    evaluation,
    evaluator_report,
    goodbye,
    target_report,
    worker_report,
)
from tests.rings import make_schema

REASONS = {"malformed", "oversized", "wrong_version", "unknown_type"}
U64 = st.integers(0, (1 << 64) - 1)
NUMBER = st.integers(0, 1 << 40)
SIZE = st.integers(1, 1 << 40)
NAME = st.text(min_size=1, max_size=20)
SETS = st.builds(SequenceSet.of, st.sets(st.integers(0, 200)), low=st.integers(0, 100))
SHARDS = st.integers(1, 9).flatmap(lambda count: st.sampled_from(shards_of(count)))
REFS = st.builds(LeaseRef, slot=NUMBER, generation=NUMBER, lease_id=NUMBER)
SEGMENTS = st.builds(SegmentRef, backing=st.sampled_from(["host", "cuda_ipc", "memory"]), name=NAME,
                     num_bytes=SIZE, num_slots=SIZE, owner_pid=NUMBER, gpu_uuid=NAME,
                     handle=st.binary(max_size=64))  # fmt: skip
ONE_LEASE = {"ring_epoch": U64, "session": U64, "number": NUMBER, "capacity": NUMBER, "lease": REFS}
MESSAGES = {
    Hello: {"worker_id": NAME, "session": U64, "number": NUMBER, "group": NAME, "capacity": NUMBER,
            "shard": SHARDS, "pid": NUMBER, "consumed": SETS, "committed": SETS, "staged": SETS},
    Heartbeat: {"ring_epoch": U64, "session": U64, "number": NUMBER, "capacity": NUMBER,
                "held": st.lists(REFS, max_size=4).map(tuple), "consumed": SETS, "committed": SETS},
    Credit: {"ring_epoch": U64, "session": U64, "number": NUMBER, "capacity": NUMBER},
    Release: ONE_LEASE,
    Nack: {**ONE_LEASE, "reason": st.sampled_from(["torn", "corrupt", "stopping"])},
    Bye: {"ring_epoch": U64, "session": U64, "committed": SETS, "is_finished": st.booleans()},
    Welcome: {"ring_epoch": U64, "session": U64, "segment": SEGMENTS,
              "row_schema": st.just(make_schema()), "total_rows": st.none() | NUMBER,
              "heartbeat_seconds": st.floats(0.01, 9.0), "lease_seconds": st.floats(0.01, 9.0)},
    Descriptor: {"ring_epoch": U64, "session": U64, "lease": REFS, "sequence": NUMBER,
                 "split": st.sampled_from(["train", "held_out"]), "attempt": NUMBER,
                 "used_tokens": NUMBER, "num_bytes": NUMBER, "token_hash": U64},
    Pulse: {"ring_epoch": U64, "session": U64, "number": NUMBER, "settled_below": NUMBER,
            "last_sequence": st.none() | st.just(-1) | NUMBER, "is_settled": st.booleans(),
            "is_drained": st.booleans()},
    Refused: {"ring_epoch": U64, "session": U64, "reason": NAME,
              "kind": st.sampled_from(typing.get_args(RefusalKind))},
}  # fmt: skip
ANY_MESSAGE = st.one_of([st.builds(kind, **fields) for kind, fields in MESSAGES.items()])
ANY_DECODER = Decoder(*MESSAGES)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def refusal(raw: bytes) -> str:
    """Decode for the owner and for a worker; nothing but `MessageError` may come out."""
    reasons = set()
    for decoder in (OWNER_DECODER, WORKER_DECODER, ANY_DECODER):
        try:
            decoder.decode(raw)
        except MessageError as error:
            reasons.add(error.reason)
    assert reasons <= REASONS
    return next(iter(reasons), "")


@given(message=ANY_MESSAGE)
def test_a_message_comes_back_as_it_was_sent(message: Record) -> None:
    assert ANY_DECODER.decode(encode(message)) == message


@given(message=ANY_MESSAGE)
def test_a_record_that_was_not_checked_is_the_checked_one(message: Record) -> None:
    unchecked = type(message).of_valid(**message.__dict__)
    assert unchecked == message
    assert hash(unchecked) == hash(message)
    assert repr(unchecked) == repr(message)
    assert unchecked.model_copy() == message
    assert unchecked.model_dump(exclude_unset=True) == message.model_dump()
    assert encode(unchecked) == encode(message)


def test_a_message_that_cannot_be_packed_leaves_nothing_in_the_next_one() -> None:
    lease = LeaseRef(slot=1, generation=2, lease_id=3)
    good = encode(lease)
    with pytest.raises((OverflowError, AttributeError)):
        encode(LeaseRef(slot=1, generation=1 << 70, lease_id=3))
    assert encode(lease) == good


def test_every_ring_message_is_covered_here() -> None:
    own = [r for r in records_of(ring_messages) if r.__module__ == ring_messages.__name__]
    assert set(MESSAGES) == set(own) - {LeaseRef, SegmentRef}


@given(raw=st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 5000)
@example(b"\xdd\xff\xff\xff\xff")
@example(msgpack.packb((PROTOCOL_VERSION, "Hello", {b"session": 1})))
@example(msgpack.packb((PROTOCOL_VERSION, ["Hello"], {})))
@example(b"\x93\x01\xd7\xff" + b"\xff" * 8 + b"\x80")
@example(b"\x93\x01\xc7\x0c\xff" + b"\xff" * 12 + b"\x80")
def test_random_bytes_are_refused_and_nothing_else_happens(raw: bytes) -> None:
    assert refusal(raw) in ("malformed", "wrong_version", "unknown_type")


@given(name=st.sampled_from([kind.__name__ for kind in MESSAGES]) | st.text(), body=JUNK)
def test_junk_in_an_envelope_is_refused_and_nothing_else_happens(name: str, body: Any) -> None:
    raw = msgpack.packb((PROTOCOL_VERSION, name, body))
    assert refusal(raw) in ("malformed", "unknown_type")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(message=ANY_MESSAGE, data=st.data())
def test_a_damaged_message_is_a_message_or_refused(message: Record, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    refusal(bytes(raw))


@given(message=ANY_MESSAGE, data=st.data())
def test_a_truncated_message_is_malformed(message: Record, data: st.DataObject) -> None:
    raw = encode(message)
    assert refusal(raw[: data.draw(st.integers(0, len(raw) - 1))]) == "malformed"
    assert refusal(raw + b"\0") == "malformed"


CONTROL_MESSAGES = [
    beat("target_server", report=target_report()),
    beat("drafter_worker", report=worker_report()),
    beat("evaluator", report=evaluator_report()),
    goodbye("evaluator"),
    control_messages.Command(name="stop", number=1),
    evaluation(),
]


def plain_bytes(message: Record) -> bytes:
    """Return a message's wire form by pydantic's own dump."""
    envelope = (PROTOCOL_VERSION, type(message).__name__, message.model_dump(mode="python"))
    return msgpack.packb(envelope, use_bin_type=True)


@given(message=ANY_MESSAGE)
def test_the_wire_form_is_pydantic_s_dump(message: Record) -> None:
    assert encode(message) == plain_bytes(message)


@pytest.mark.parametrize("message", CONTROL_MESSAGES, ids=lambda message: type(message).__name__)
def test_the_wire_form_of_control_messages_is_pydantic_s_dump(message: Record) -> None:
    assert encode(message) == plain_bytes(message)
    assert Decoder(type(message)).decode(encode(message)) == message


def containers(body: Any) -> list[dict[str, Any]]:
    """Return every map of a message, the innermost last."""
    found = [body] if isinstance(body, dict) else []
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, tuple) else ()
    return found + [one for value in inner for one in containers(value)]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(message=ANY_MESSAGE, data=st.data())
def test_a_message_is_taken_or_refused_as_pydantic_s_strict_validation_does(
    message: Record, data: st.DataObject
) -> None:
    body = message.model_dump(mode="python")
    for _ in range(data.draw(st.integers(0, 3))):
        fields = data.draw(st.sampled_from(containers(body)))
        name = data.draw(st.sampled_from(sorted(fields)) | st.text(max_size=4))
        if data.draw(st.booleans()):
            fields[name] = data.draw(JUNK)
        else:
            fields.pop(name, None)
        assume(all(containers(body)))  # something is left to change
    raw = msgpack.packb((PROTOCOL_VERSION, type(message).__name__, body))
    received = msgpack.unpackb(raw, use_list=False)[2]
    try:
        expected = type(message).model_validate(received)
    except ValidationError:
        with pytest.raises(MessageError, match="malformed"):
            ANY_DECODER.decode(raw)
    else:
        assert ANY_DECODER.decode(raw) == expected


@pytest.mark.parametrize("version", [0, 1, 2, PROTOCOL_VERSION + 1, "3", None, 3.0, True])
def test_another_version_is_refused_before_its_fields_are_read(version: Any) -> None:
    assert refusal(msgpack.packb((version, "Hello", {}))) == "wrong_version"


def test_a_type_that_is_not_expected_here_is_unknown() -> None:
    release = Release(ring_epoch=1, session=1, number=1, capacity=1,
                      lease=LeaseRef(slot=0, generation=0, lease_id=0))  # fmt: skip
    with pytest.raises(MessageError, match="unknown_type"):
        WORKER_DECODER.decode(encode(release))


def test_a_message_over_the_limit_is_oversized() -> None:
    assert refusal(bytes(MAX_MESSAGE_BYTES + 1)) == "oversized"


@pytest.mark.parametrize(
    "change",
    [{"session": -1}, {"session": 1 << 63 << 1}, {"session": True}, {"session": "1"}, {"capacity": 1.0},
     {"extra": 1}, {"group": ""}, {"consumed": {"low": 3, "above": (1,)}},
     {"consumed": {"low": 0, "above": (2, 1)}}, {"consumed": {"low": 0, "above": (1, 1)}}],
    ids=str,
)  # fmt: skip
def test_fields_are_strict(change: dict[str, Any]) -> None:
    fields = {"worker_id": "w", "session": 1, "number": 1, "group": "g", "capacity": 1, "pid": 1, "shard": {},
              "consumed": {}, "committed": {}, "staged": {}}  # fmt: skip
    assert Hello.model_validate(fields)
    with pytest.raises(ValidationError):
        Hello.model_validate(fields | change)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_an_interval_that_no_timer_can_keep_is_refused(seconds: float) -> None:
    with pytest.raises(ValidationError):
        Welcome(ring_epoch=1, session=1, total_rows=None, row_schema=make_schema(), lease_seconds=1.0,
                segment=SegmentRef(backing="host", name="s", num_bytes=1, num_slots=1, owner_pid=1),
                heartbeat_seconds=seconds)  # fmt: skip


# -- sets of sequences -----------------------------------------------------------------------------

MEMBERS = st.sets(st.integers(0, 60))
LOWS = st.integers(0, 60)


def members(known: SequenceSet) -> set[int]:
    return {sequence for sequence in range(130) if sequence in known}


@given(above=MEMBERS, low=LOWS)
def test_a_set_contains_all_below_its_mark_and_its_exceptions(above: set[int], low: int) -> None:
    known = SequenceSet.of(above, low=low)
    assert members(known) == set(range(low)) | above
    assert known.low not in known


@given(one=MEMBERS, two=MEMBERS, low=LOWS, other=LOWS)
def test_a_union_is_what_is_in_either(one: set[int], two: set[int], low: int, other: int) -> None:
    first, second = SequenceSet.of(one, low=low), SequenceSet.of(two, low=other)
    assert members(first.union(second)) == members(first) | members(second)
    assert first.union(second) == second.union(first)


@given(above=MEMBERS, low=LOWS, count=st.integers(0, 10))
def test_the_lowest_of_a_set_says_less_and_never_more(
    above: set[int], low: int, count: int
) -> None:
    known = SequenceSet.of(above, low=low)
    told = known.lowest(count)
    assert members(told) <= members(known)
    assert len(told.above) <= count
    assert told.low == known.low


@given(above=MEMBERS, low=LOWS)
def test_a_set_survives_a_checkpoint_s_json(above: set[int], low: int) -> None:
    known = SequenceSet.of(above, low=low)
    assert SequenceSet.model_validate_json(known.model_dump_json()) == known


# -- what messages are made of ---------------------------------------------------------------------


def is_record(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Record) and value is not Record


def records_of(module: ModuleType) -> list[type[Record]]:
    return [value for _, value in inspect.getmembers(module, is_record)]


def leaves(annotation: Any) -> set[Any]:
    """Return the plain types that an annotation is made of."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return {type(argument) for argument in arguments}
    if not arguments:
        return {annotation}
    return {
        leaf
        for argument in arguments
        if not hasattr(argument, "metadata")
        for leaf in leaves(argument)
    }


def test_no_message_carries_a_tensor_an_array_or_a_view_of_memory() -> None:
    plain = {int, float, str, bool, bytes, type(None), Ellipsis}
    for module in (control_messages, ring_messages, rows):
        for record in records_of(module):
            for name, field in record.model_fields.items():
                found = leaves(field.annotation) - plain
                strange = [leaf for leaf in found if not is_record(leaf)]
                assert not strange, f"{record.__name__}.{name}: {strange}"


def test_every_record_is_frozen_strict_and_closed() -> None:
    for module in (control_messages, ring_messages, rows):
        for record in records_of(module):
            config = typing.cast("type[BaseModel]", record).model_config
            assert config.get("frozen"), record
            assert config.get("strict"), record
            assert config.get("extra") == "forbid", record
