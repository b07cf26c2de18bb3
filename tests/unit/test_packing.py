"""Samples are packed whole, first fit, into the same rows for the same samples."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.loading import Table, load
from common.contracts.sequences import ONE_RING, shards_of
from common.errors import ConfigError
from services.target_server.data_config import DataTable
from services.target_server.packing import RowStream, Sample, first_fit, make_row

TABLE = DataTable(path=Path(__file__), row_tokens=128, max_documents=4, packing_window=3)


class ListedSamples:
    """Samples of given lengths; each pass is rotated by one."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def order(self, data_epoch):
        ids = list(range(len(self.lengths)))
        return ids[data_epoch:] + ids[:data_epoch]

    def samples(self, data_epoch):
        for sample_id in self.order(data_epoch):
            yield sample_of(sample_id, self.lengths[sample_id])


def sample_of(sample_id, length):
    token_ids = np.arange(length, dtype=np.int32) + 1000 * (sample_id + 1)
    return Sample(sample_id, sample_id % 7, token_ids, (token_ids % 2).astype(np.uint8))


def rows_of(lengths, table=TABLE, shard=ONE_RING):
    return list(RowStream(ListedSamples(lengths), table).rows(shard))


lengths_of_samples = st.lists(st.integers(2, 128), min_size=1, max_size=60)


@settings(deadline=None)
@given(lengths_of_samples)
def test_every_sample_is_in_one_row_whole(lengths):
    rows = rows_of(lengths)
    found = {}
    for row in rows:
        assert len(row.documents) <= TABLE.max_documents
        for document in row.documents:
            span = slice(document.start, document.start + document.length)
            found[document.sample_id] = row.token_ids[span].tolist()
    assert found == {i: sample_of(i, n).token_ids.tolist() for i, n in enumerate(lengths)}
    assert sum(len(row.documents) for row in rows) == len(lengths)


@settings(deadline=None)
@given(lengths_of_samples, st.integers(1, 3), st.integers(1, 4))
def test_the_rings_of_a_run_share_out_the_rows_of_one_packing(lengths, data_epochs, count):
    table = TABLE.model_copy(update={"data_epochs": data_epochs})
    straight = rows_of(lengths, table)
    assert [row.sequence for row in straight] == list(range(len(straight)))
    shared_out = [row for shard in shards_of(count) for row in rows_of(lengths, table, shard)]
    shared_out.sort(key=lambda row: row.sequence)
    for one, other in zip(straight, shared_out, strict=True):
        assert one.sequence == other.sequence
        assert one.documents == other.documents
        assert np.array_equal(one.token_ids, other.token_ids)


@settings(deadline=None)
@given(lengths_of_samples, st.integers(1, 3))
def test_count_of_rows_is_what_comes(lengths, data_epochs):
    table = TABLE.model_copy(update={"data_epochs": data_epochs})
    assert RowStream(ListedSamples(lengths), table).count_rows() == len(rows_of(lengths, table))


def test_rows_of_a_large_source_are_not_counted_ahead():
    table = TABLE.model_copy(update={"count_ahead_conversations": 2})
    assert RowStream(ListedSamples([5, 5, 5]), table).count_rows() is None


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


def test_a_full_row_leaves_the_window_at_once():
    samples = [range(100), range(28), range(50)]
    assert next(first_fit(iter(samples), 128, 64, 16)) == samples[:2]


def test_a_row_of_max_documents_is_closed():
    assert [len(row) for row in first_fit([range(1)] * 10, 128, 4, 16)] == [4, 4, 2]


def test_the_fullest_row_is_closed_where_the_window_has_no_room():
    samples = [range(90), range(100), range(60)]
    assert list(first_fit(samples, 128, 64, 2)) == [[samples[1]], [samples[0]], [samples[2]]]


def test_short_samples_fill_rows_almost_wholly():
    lengths = np.random.default_rng(0).integers(40, 200, size=2000).tolist()
    table = TABLE.model_copy(update={"row_tokens": 1024, "max_documents": 64})
    rows = rows_of(lengths, table)
    assert sum(lengths) / (1024 * len(rows)) > 0.95


def test_row_tokens_are_a_multiple_of_the_tile():
    class Config(Table):
        data: DataTable

    with pytest.raises(ConfigError, match=r"data\.row_tokens.*multiple of 128.*1152"):
        load(Config, [], ["data.path=x", "data.row_tokens=1100"], {})
