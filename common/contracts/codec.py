"""Records to bytes and back: msgpack of (version, type, fields), decoded strictly.

A receiver decodes against the set of types it expects. Whatever does not fit raises
`MessageError` with the counter it belongs to; nothing else escapes, so no message can end a
receiver.
"""

import threading
from operator import attrgetter
from typing import Any

import msgpack
from pydantic import ValidationError

from common.contracts.record import Record
from common.errors import MessageError

PROTOCOL_VERSION = 3
MAX_MESSAGE_BYTES = 1 << 20
# A record holds its fields and nothing else there: what `model_dump` returns, several times faster.
_FIELDS = attrgetter("__dict__")


class _Packer(threading.local):
    """A thread's own packer: to make one takes as long as to pack a message."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(default=_FIELDS).pack


_packer = _Packer()


def encode(record: Record) -> bytes:
    """Return the wire form of a record."""
    packed: bytes = _packer.pack((PROTOCOL_VERSION, type(record).__name__, record.__dict__))
    return packed


class Decoder:
    """Decodes the given record types and refuses every other."""

    def __init__(self, *types: type[Record]) -> None:
        self._validate = {
            record_type.__name__: record_type.__pydantic_validator__.validate_python
            for record_type in types
        }

    def decode(self, raw: bytes) -> Any:
        """Return the record in `raw`, or raise `MessageError` naming the counter."""
        version, name, body = _open_envelope(raw)
        if type(version) is not int or version != PROTOCOL_VERSION:
            raise MessageError("wrong_version", f"got {version!r}, expected {PROTOCOL_VERSION}")
        validate = self._validate.get(name) if isinstance(name, str) else None
        if validate is None:
            raise MessageError("unknown_type", f"got {name!r}, expected {sorted(self._validate)}")
        try:
            return validate(body)
        except ValidationError as error:
            raise MessageError("malformed", f"{name}: {error.error_count()} bad fields") from error


def _open_envelope(raw: bytes) -> tuple[Any, Any, Any]:
    if len(raw) > MAX_MESSAGE_BYTES:
        raise MessageError(
            "oversized", f"got {len(raw)} bytes, expected at most {MAX_MESSAGE_BYTES}"
        )
    try:
        envelope = msgpack.unpackb(raw, use_list=False, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MessageError("malformed", f"not msgpack: {error}") from error
    if not isinstance(envelope, tuple) or len(envelope) != 3:
        raise MessageError("malformed", "not a (version, type, fields) triple")
    return envelope
