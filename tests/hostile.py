"""Messages that make no sense, from a `random.Random`: fuzzing and Hypothesis both lead it.

`any_record` is well formed and says anything; `mutate` breaks what is well formed.
"""

import random
from collections.abc import Callable
from typing import Any, get_args

import msgpack

from common.contracts.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, encode
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
    SegmentRef,
    Welcome,
)
from common.contracts.sequences import ONE_RING, SequenceSet, Shard
from tests.rings import EPOCH, make_schema

OWNER_HEARS: tuple[type[Record], ...] = (
    Hello, Heartbeat, Heartbeat, Credit, Release, Release, Nack, Bye,
)  # fmt: skip
WORKER_HEARS: tuple[type[Record], ...] = (Welcome, Descriptor, Descriptor, Pulse, Refused)
REASONS = {"oversized", "malformed", "wrong_version", "unknown_type"}
_EDGES = (0, 1, 2, 127, 128, 255, 256, 65535, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
_NAMES = ("main", "other", "one", "two", "../../etc/passwd", "ringdraft-a-1-0123abcd-" + "0" * 16)
_ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 1 << 63, 1.5, float("nan"), float("inf"), 5e-324, 1e308, "", "x" * 300, b"", b"\xff" * 40,
    (), (1, 2, 3), {}, {"a": 1}, {"low": 5, "above": (1,)}, (((((),),),),),
    msgpack.ExtType(5, b"ext"), msgpack.Timestamp(1, 2),
)  # fmt: skip


def any_record(kind: type[Record], chance: random.Random, **known: Any) -> Record:
    """Return a well-formed record whose values are few, so that many nearly fit."""
    values: dict[str, Any] = {
        "ring_epoch": chance.choice([EPOCH, EPOCH, EPOCH, 1]),
        "session": chance.choice([1, 2, 3, *_EDGES]),
        "number": chance.choice([chance.randrange(1000), *_EDGES]),
        "capacity": chance.choice([0, 1, 2, 3, (1 << 64) - 1]),
        "lease": any_lease(chance),
        "held": tuple(any_lease(chance) for _ in range(chance.randrange(4))),
        "pid": chance.choice(_EDGES),
        "consumed": any_set(chance), "committed": any_set(chance), "staged": any_set(chance),
        "group": chance.choice(["main", "main", "other"]),
        "shard": chance.choice([ONE_RING, ONE_RING, Shard(index=1, count=2)]),
        "worker_id": chance.choice(_NAMES[2:4]),
        "segment": any_segment(chance),
        "row_schema": make_schema(row_tokens=chance.choice([128, 256, (1 << 32) - 1])),
        "total_rows": chance.choice([None, *_EDGES]),
        "heartbeat_seconds": chance.choice([0.001, 0.05, 86_400.0]),
        "lease_seconds": chance.choice([0.001, 86_400.0]),
        "sequence": chance.choice(_EDGES), "split": chance.choice(["train", "held_out"]),
        "attempt": chance.choice(_EDGES), "used_tokens": chance.choice([0, 128, 129, 1 << 40]),
        "num_bytes": chance.choice(_EDGES), "token_hash": chance.choice(_EDGES),
        "settled_below": chance.choice(_EDGES), "last_sequence": chance.choice([None, -1, *_EDGES]),
        "is_settled": chance.random() < 0.5, "is_drained": chance.random() < 0.5,
        "is_finished": chance.random() < 0.5,
        "kind": chance.choice(get_args(RefusalKind)),
        "reason": chance.choice(["torn", "corrupt", "stopping"]),
        **known,
    }  # fmt: skip
    return kind(**{name: values[name] for name in kind.model_fields})


def any_lease(chance: random.Random) -> LeaseRef:
    """Return a reference that now and then is that of a real lease."""
    return LeaseRef(
        slot=chance.choice([0, 1, 2, 3, *_EDGES]),
        generation=chance.choice([0, 1, 2, 3, *_EDGES]),
        lease_id=chance.choice([*range(1, 20), *_EDGES]),
    )


def any_set(chance: random.Random) -> SequenceSet:
    """Return a set of sequences, small ones for the most part."""
    members = chance.sample(range(40), chance.randrange(5)) + chance.sample(_EDGES, 1)
    return SequenceSet.of(members, low=chance.choice([0, 0, chance.randrange(10), 1 << 63]))


def any_segment(chance: random.Random) -> SegmentRef:
    """Return a segment that is not there."""
    return SegmentRef(
        backing=chance.choice(["host", "memory", "cuda_ipc"]), name=chance.choice(_NAMES),
        num_bytes=chance.choice(_EDGES[1:]), num_slots=chance.choice(_EDGES[1:]), owner_pid=1,
        gpu_uuid=chance.choice(["", "GPU-0"]), handle=chance.choice([b"", bytes(64)]),
    )  # fmt: skip


def mutate(raw: bytes, chance: random.Random) -> bytes:
    """Return a message broken in one to three ways."""
    for _ in range(chance.randrange(1, 4)):
        raw = chance.choice(_MUTATIONS)(raw, chance)
    return raw


def _flip(raw: bytes, chance: random.Random) -> bytes:
    changed = bytearray(raw or b"\0")
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _cut(raw: bytes, chance: random.Random) -> bytes:
    return raw[: chance.randrange(len(raw) + 1)]


def _insert(raw: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(raw) + 1)
    return raw[:place] + chance.randbytes(chance.randrange(1, 9)) + raw[place:]


def _repeat_a_part(raw: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
    return raw[:end] + raw[start:]


def _swap_type_byte(raw: bytes, chance: random.Random) -> bytes:
    """Put one of msgpack's type bytes somewhere: lengths, extensions, floats, nested arrays."""
    changed = bytearray(raw or b"\0")
    changed[chance.randrange(len(changed))] = chance.randrange(0xC0, 0xE0)
    return bytes(changed)


def _change_a_value(raw: bytes, chance: random.Random) -> bytes:
    """Keep the message well formed and put something else into one place of it."""
    try:
        envelope = msgpack.unpackb(raw, raw=False)
    except Exception:  # noqa: BLE001 - broken already
        return raw
    return msgpack.packb(_with_change(envelope, chance), use_bin_type=True, default=repr)


def _with_change(value: Any, chance: random.Random) -> Any:
    if isinstance(value, list | tuple) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [_with_change(v, chance) if i == place else v for i, v in enumerate(value)]
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        if chance.random() < 0.2:  # a field more, or one less
            rest = {k: v for k, v in value.items() if k != key}
            return rest | {"surplus": 1} if chance.random() < 0.5 else rest
        return value | {key: _with_change(value[key], chance)}
    if chance.random() < 0.3:
        return chance.choice(_ODD_VALUES)
    return chance.choice(_EDGES if isinstance(value, int) else _ODD_VALUES)


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _cut, _insert, _repeat_a_part, _swap_type_byte, _change_a_value, _change_a_value,
)  # fmt: skip


def refused_messages(kinds: tuple[type[Record], ...], chance: random.Random) -> dict[str, bytes]:
    """Return one message for each reason to refuse it, each wrong in one way only."""
    record = any_record(chance.choice(kinds), chance)
    body, name = record.model_dump(mode="python"), type(record).__name__
    others = {*OWNER_HEARS, *WORKER_HEARS} - set(kinds)
    own = PROTOCOL_VERSION
    version = chance.choice(
        [0, own - 1, own + 1, -1, True, None, str(own), float(own), (), 1 << 63]
    )
    stranger = chance.choice([*(k.__name__ for k in others), "", name.lower(), None, 1, ()])
    field = chance.choice(list(body))
    return {
        "wrong_version": msgpack.packb((version, name, body), use_bin_type=True),
        "unknown_type": msgpack.packb((PROTOCOL_VERSION, stranger, body), use_bin_type=True),
        "malformed": chance.choice([
            chance.randbytes(chance.randrange(200)).replace(b"\x93", b""),
            encode(record)[: chance.randrange(len(encode(record)))],
            msgpack.packb((PROTOCOL_VERSION, name, body | {field: -1.5})),
            msgpack.packb((PROTOCOL_VERSION, name, body | {"surplus": 0})),
            msgpack.packb((PROTOCOL_VERSION, name, {k: body[k] for k in body if k != field})),
            msgpack.packb((PROTOCOL_VERSION, name, tuple(body.values()))),
        ]),
        "oversized": encode(record) + bytes(MAX_MESSAGE_BYTES),
    }  # fmt: skip
