"""Bytes of a slot: a 4 KiB header page, then the row's fields at 4 KiB-aligned offsets.

    page 0   header (96 bytes, little endian), then zeros
    ...      documents, token_ids, document_ids, position_ids, loss_mask, aux_hidden_states, ...

The header validates, it does not lock. Its generation is 0 while the slot is being rewritten
(rule R1); a reader compares ring_epoch, slot, generation and sequence after its copy.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from common.contracts.rows import DocumentSpan, RowSchema, Split
from common.errors import CorruptSlotError

PAGE_BYTES = 4096
MAGIC = b"RINGDRFT"
LAYOUT_VERSION = 1
SPLITS: tuple[Split, ...] = ("train", "held_out")

_HEADER = struct.Struct("<8sIIQQQIIIIQQQQ8x")
_DOCUMENT = struct.Struct("<QHHII4x")
_ELEMENT_BYTES = {"int32": 4, "uint8": 1, "float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Field:
    """One field of a row inside a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SlotHeader(NamedTuple):
    """What page 0 of a slot says of the row behind it."""

    ring_epoch: int
    slot: int
    generation: int
    sequence: int
    split: Split
    used_tokens: int
    num_documents: int
    payload_bytes: int
    token_hash: int
    payload_hash: int
    """xxh3 of the payload, 0 where checksums are off."""
    schema_fingerprint: int


class SlotLayout:
    """Offsets of every field for a schema."""

    def __init__(self, schema: RowSchema) -> None:
        self.schema = schema
        self.fingerprint = schema.fingerprint
        self.fields = {field.name: field for field in _place_fields(schema)}
        self.head_bytes = self.fields["aux_hidden_states"].offset
        """Header page and small fields: everything in front of the hidden states."""
        last = list(self.fields.values())[-1]
        self.slot_bytes = last.offset + _round_up(last.num_bytes)
        self.payload_bytes = self.slot_bytes - PAGE_BYTES

    def hash_tokens(self, slot: memoryview) -> int:
        """Return the xxh3 of a slot's token ids."""
        field = self.fields["token_ids"]
        return xxhash.xxh3_64_intdigest(slot[field.offset : field.offset + field.num_bytes])


def pack_header(header: SlotHeader) -> bytes:
    """Return the header's bytes."""
    return _HEADER.pack(
        MAGIC,
        LAYOUT_VERSION,
        header.slot,
        header.ring_epoch,
        header.generation,
        header.sequence,
        SPLITS.index(header.split),
        header.used_tokens,
        header.num_documents,
        0,
        header.payload_bytes,
        header.token_hash,
        header.payload_hash,
        header.schema_fingerprint,
    )


def unpack_header(page: bytes | memoryview) -> SlotHeader:
    """Return the header, or raise `CorruptSlotError` for bytes that are none."""
    (magic, version, slot, ring_epoch, generation, sequence, split, used_tokens, num_documents, _,
     payload_bytes, token_hash, payload_hash, schema) = _HEADER.unpack_from(page)  # fmt: skip
    if magic != MAGIC or version != LAYOUT_VERSION:
        raise CorruptSlotError(
            f"slot header: got magic {bytes(magic)!r} version {version}, "
            f"expected {MAGIC!r} version {LAYOUT_VERSION}; the segment is another program's"
        )
    if split >= len(SPLITS):
        raise CorruptSlotError(f"slot {slot} header: got split {split}, expected 0 or 1")
    return SlotHeader(
        ring_epoch, slot, generation, sequence, SPLITS[split], used_tokens, num_documents,
        payload_bytes, token_hash, payload_hash, schema,
    )  # fmt: skip


def pack_documents(documents: Iterable[DocumentSpan]) -> bytes:
    """Return the table of documents, one 24-byte entry each."""
    return b"".join(_DOCUMENT.pack(d.sample_id, d.tag, 0, d.start, d.length) for d in documents)


def unpack_documents(table: bytes | memoryview, count: int) -> tuple[DocumentSpan, ...]:
    """Return the first `count` entries of a table of documents."""
    entries = (_DOCUMENT.unpack_from(table, index * _DOCUMENT.size) for index in range(count))
    return tuple(
        DocumentSpan(sample_id=sample, tag=tag, start=start, length=length)
        for sample, tag, _, start, length in entries
    )


HEADER_BYTES = _HEADER.size
DOCUMENT_BYTES = _DOCUMENT.size


def _place_fields(schema: RowSchema) -> list[Field]:
    tokens, width = schema.row_tokens, schema.hidden_size
    shapes = [
        ("documents", "uint8", (schema.max_documents, DOCUMENT_BYTES)),
        ("token_ids", "int32", (tokens,)),
        ("document_ids", "int32", (tokens,)),
        ("position_ids", "int32", (tokens,)),
        ("loss_mask", "uint8", (tokens,)),
        ("aux_hidden_states", schema.aux_dtype, (tokens, len(schema.target_layer_ids) * width)),
    ]
    if schema.aux_dtype == "float8_e4m3fn":
        shapes.append(("aux_scales", "float32", (tokens,)))
    if schema.has_last_hidden_states_normed:
        shapes.append(("last_hidden_states_normed", "bfloat16", (tokens, width)))
    fields, offset = [], PAGE_BYTES
    for name, dtype, shape in shapes:
        num_bytes = _ELEMENT_BYTES[dtype]
        for extent in shape:
            num_bytes *= extent
        fields.append(Field(name, dtype, shape, offset, num_bytes))
        offset += _round_up(num_bytes)
    return fields


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
