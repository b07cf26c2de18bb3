"""Bytes of a slot."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.rows import DocumentSpan
from common.errors import CorruptSlotError
from common.ring.layout import (
    DOCUMENT_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    SlotHeader,
    SlotLayout,
    pack_documents,
    pack_header,
    unpack_documents,
    unpack_header,
)
from tests.rings import make_schema

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
HEADERS = st.builds(
    SlotHeader, ring_epoch=U64, slot=U32, generation=U64, sequence=U64,
    split=st.sampled_from(["train", "held_out"]), used_tokens=U32, num_documents=U32,
    payload_bytes=U64, token_hash=U64, payload_hash=U64, schema_fingerprint=U64,
)  # fmt: skip
SPANS = st.builds(DocumentSpan, sample_id=U64, tag=U16, start=U32, length=U32)


@given(header=HEADERS)
def test_a_header_comes_back_as_it_was_written(header: SlotHeader) -> None:
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES <= PAGE_BYTES
    assert unpack_header(packed.ljust(PAGE_BYTES, b"\0")) == header


@given(spans=st.lists(SPANS, max_size=8))
def test_a_table_of_documents_comes_back_as_it_was_written(spans: list[DocumentSpan]) -> None:
    table = pack_documents(spans)
    assert len(table) == len(spans) * DOCUMENT_BYTES
    assert unpack_documents(table + b"\xff" * DOCUMENT_BYTES, len(spans)) == tuple(spans)


@given(page=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_bytes_that_are_no_header_are_refused(page: bytes) -> None:
    with pytest.raises(CorruptSlotError):
        unpack_header(page)


@pytest.mark.parametrize("offset", [0, 8])
def test_another_magic_or_version_is_refused_by_name(offset: int) -> None:
    packed = bytearray(pack_header(SlotHeader(1, 0, 1, 0, "train", 1, 1, 1, 1, 1, 1)))
    packed[offset] ^= 0xFF
    with pytest.raises(CorruptSlotError, match="another program"):
        unpack_header(packed)


def test_a_slot_that_is_being_written_has_no_header() -> None:
    with pytest.raises(CorruptSlotError):
        unpack_header(bytes(PAGE_BYTES))


@pytest.mark.parametrize("aux_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("has_last", [False, True])
def test_fields_are_page_aligned_and_do_not_overlap(aux_dtype: str, has_last: bool) -> None:
    schema = make_schema(
        aux_dtype=aux_dtype, has_last_hidden_states_normed=has_last, row_tokens=384
    )
    layout = SlotLayout(schema)
    end = PAGE_BYTES
    for field in layout.fields.values():
        assert field.offset % PAGE_BYTES == 0
        assert field.offset >= end
        end = field.offset + field.num_bytes
    assert layout.slot_bytes % PAGE_BYTES == 0
    assert layout.slot_bytes - end < PAGE_BYTES
    assert layout.payload_bytes == layout.slot_bytes - PAGE_BYTES
    assert ("aux_scales" in layout.fields) == (aux_dtype == "float8_e4m3fn")
    assert ("last_hidden_states_normed" in layout.fields) == has_last


def test_field_sizes_follow_the_schema() -> None:
    schema = make_schema(row_tokens=256, hidden_size=8, target_layer_ids=(1, 2, 3))
    sizes = {name: field.num_bytes for name, field in SlotLayout(schema).fields.items()}
    assert sizes == {
        "documents": 4 * DOCUMENT_BYTES, "token_ids": 1024, "document_ids": 1024,
        "position_ids": 1024, "loss_mask": 256, "aux_hidden_states": 256 * 24 * 2,
    }  # fmt: skip


def test_any_change_of_a_schema_changes_its_fingerprint() -> None:
    changes: list[dict] = [
        {}, {"row_tokens": 256}, {"max_documents": 5}, {"hidden_size": 16},
        {"target_layer_ids": (2, 1)}, {"aux_dtype": "float8_e4m3fn"},
        {"has_last_hidden_states_normed": True}, {"target_fingerprint": "other"},
        {"template_fingerprint": "other"}, {"feature_engine": "other"},
    ]  # fmt: skip
    prints = [make_schema(**change).fingerprint for change in changes]
    assert len(set(prints)) == len(changes)
    assert make_schema().fingerprint == prints[0]


def test_token_hashes_cover_the_token_field_alone() -> None:
    layout = SlotLayout(make_schema())
    slot = bytearray(os.urandom(layout.slot_bytes))
    before = layout.hash_tokens(memoryview(slot))
    slot[layout.fields["loss_mask"].offset] ^= 1
    assert layout.hash_tokens(memoryview(slot)) == before
    slot[layout.fields["token_ids"].offset] ^= 1
    assert layout.hash_tokens(memoryview(slot)) != before


def test_the_document_has_every_field_of_a_row() -> None:
    layout = SlotLayout(make_schema(aux_dtype="float8_e4m3fn", has_last_hidden_states_normed=True))
    document = (Path(__file__).parents[2] / "docs" / "ring-protocol.md").read_text()
    table = re.search(r"^\| field \| type, shape \|\n(?:\|.*\n)+", document, re.MULTILINE)
    assert table is not None
    assert [name for name in layout.fields if f"`{name}`" not in table[0]] == []
