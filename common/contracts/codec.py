"""Records to bytes and back: msgpack of (version, type, fields), decoded strictly.

A receiver decodes against the set of types it expects. Whatever does not fit raises
`MessageError` with the counter it belongs to; nothing else escapes, so no message can end a
receiver.
"""

from typing import Any

import msgpack
from pydantic import ValidationError

from common.contracts.record import Record
from common.errors import MessageError

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20


def encode(record: Record) -> bytes:
    """Return the wire form of a record."""
    body = record.model_dump(mode="python")
    return msgpack.packb((PROTOCOL_VERSION, type(record).__name__, body), use_bin_type=True)


class Decoder:
    """Decodes the given record types and refuses every other."""

    def __init__(self, *types: type[Record]) -> None:
        self._types = {record_type.__name__: record_type for record_type in types}

    def decode(self, raw: bytes) -> Any:
        """Return the record in `raw`, or raise `MessageError` naming the counter."""
        version, name, body = _open_envelope(raw)
        if type(version) is not int or version != PROTOCOL_VERSION:
            raise MessageError("wrong_version", f"got {version!r}, expected {PROTOCOL_VERSION}")
        record_type = self._types.get(name) if isinstance(name, str) else None
        if record_type is None:
            raise MessageError("unknown_type", f"got {name!r}, expected {sorted(self._types)}")
        try:
            return record_type.model_validate(body)
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
