"""Samples are packed whole, best fit, each into one row; rows are nearly full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.loading import Table, load
from common.errors import ConfigError
from services.target_server.data_config import DataTable
from services.target_server.packing import Packer, Sample, make_row, pack

ROW_TOKENS, MAX_DOCUMENTS, WINDOW = 128, 4, 3


def sample_of(sample_id, length):
    token_ids = np.arange(length, dtype=np.int32) + 1000 * (sample_id + 1)
    return Sample(sample_id, sample_id % 7, token_ids, (token_ids % 2).astype(np.uint8))


def packed(lengths, row_tokens=ROW_TOKENS, max_documents=MAX_DOCUMENTS, window=WINDOW):
    samples = [range(length) for length in lengths]
    return [
        [len(sample) for sample in row]
        for row in pack(Packer(row_tokens, max_documents, window), samples)
    ]


@settings(deadline=None)
@given(st.lists(st.integers(2, 128), max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_every_sample_is_in_one_row_and_rows_hold_what_they_may(lengths, max_documents, window):
    rows = packed(lengths, max_documents=max_documents, window=window)
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    for row in rows:
        assert len(row) <= max_documents
        assert sum(row) <= ROW_TOKENS


@settings(deadline=None)
@given(st.lists(st.integers(2, 128), max_size=60), st.integers(0, 60))
def test_a_packer_goes_on_from_another_ones_open_rows(lengths, count):
    samples = [range(length) for length in lengths]
    first, second = Packer(ROW_TOKENS, 4, 3), Packer(ROW_TOKENS, 4, 3)
    rows = [row for sample in samples[:count] if (row := first.add(sample)) is not None]
    second.restore([list(row.samples) for row in first.open_rows])
    assert rows + list(pack(second, samples[count:])) == list(pack(Packer(128, 4, 3), samples))


def test_a_sample_goes_where_it_leaves_the_least_room():
    assert packed([60, 90, 30]) == [[60], [90, 30]]


def test_a_full_row_leaves_the_window_at_once():
    samples = [range(100), range(28), range(50)]
    assert next(pack(Packer(128, 64, 16), iter(samples))) == samples[:2]


def test_a_row_of_max_documents_is_closed():
    assert packed([1] * 10, max_documents=4) == [[1] * 4, [1] * 4, [1] * 2]


def test_the_fullest_row_is_closed_where_the_window_has_no_room():
    assert packed([90, 100, 60], window=2) == [[100], [90], [60]]


@pytest.mark.parametrize("sigma", [0.6, 0.8, 1.0, 1.2])
def test_lengths_as_in_chats_fill_rows_to_97_percent(sigma):
    defaults = DataTable(path=__file__)
    lengths = np.random.default_rng(0).lognormal(np.log(600), sigma, 10_000).astype(int)
    lengths = lengths[(lengths >= 8) & (lengths <= defaults.row_tokens)].tolist()
    rows = packed(lengths, defaults.row_tokens, defaults.max_documents, defaults.packing_window)
    assert sum(lengths) / (defaults.row_tokens * len(rows)) > 0.97


def test_a_row_lays_documents_side_by_side_and_pads_the_rest():
    row = make_row([sample_of(3, 5), sample_of(1, 4)], 128, sequence=9, data_epoch=2)
    assert (row.sequence, row.data_epoch, row.used_tokens) == (9, 2, 9)
    assert [(d.sample_id, d.tag, d.start, d.length) for d in row.documents] == [
        (3, 3, 0, 5),
        (1, 1, 5, 4),
    ]
    assert row.document_ids[:9].tolist() == [0] * 5 + [1] * 4
    assert row.position_ids[:9].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert row.loss_mask[:9].tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 1]
    assert (row.document_ids[9:] == -1).all()
    assert not row.loss_mask[9:].any()
    assert row.position_ids[9:].tolist() == list(range(128 - 9))
    assert row.token_ids.dtype == row.document_ids.dtype == row.position_ids.dtype == np.int32
    assert row.loss_mask.dtype == np.uint8


def test_row_tokens_are_a_multiple_of_the_tile():
    class Config(Table):
        data: DataTable

    with pytest.raises(ConfigError, match=r"data\.row_tokens.*multiple of 128.*1152"):
        load(Config, [], ["data.path=x", "data.row_tokens=1100"], {})
