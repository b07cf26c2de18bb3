"""Rows have the same sequences whether a run goes through or goes on from a cursor."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.contracts.sequences import shards_of
from common.errors import ConfigError
from services.target_server.cursors import Cursors
from services.target_server.row_stream import RowStream
from tests.conversation_files import conversations, turns, write


def files(folder, counts, suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst")):
    """Write a file for each count, of conversations of many lengths; each third file's first row is bad."""
    sources = []
    for index, (count, suffix) in enumerate(zip(counts, suffixes, strict=False)):
        rows = [
            {"messages": turns(answer="fox " * (1 + i * 7 % 30) + str(i))} for i in range(count)
        ]
        rows[0] = "{" if index == 0 and count > 1 else rows[0]
        sources.append({"path": write(folder / f"part-{index}{suffix}", rows)})
    return sources


class Settled:
    """What every group has committed, set by hand."""

    below = 0

    def __call__(self):
        return self.below


def stream_of(sources, folder=None, settled=None, **changes):
    changes = {"max_documents": 6, "packing_window": 3, "cursor_rows": 1, "seed": 3} | changes
    source = conversations(None, sources=sources, **changes)
    cursors = Cursors(folder, settled or Settled()) if folder else None
    return RowStream(source, source._table, cursors)


def content(rows):
    return [(row.sequence, row.data_epoch, row.documents, row.token_ids.tobytes()) for row in rows]


run_settings = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "shuffle_buffer": st.integers(1, 20),
        "packing_window": st.integers(1, 4),
        "max_documents": st.sampled_from([1, 2, 6]),
        "data_epochs": st.integers(1, 3),
        "cursor_rows": st.integers(1, 4),
    }
)
counts = st.lists(st.integers(1, 25), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts,
    run_settings,
    st.data(),
    st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=3, max_size=3),
)
def test_a_cursor_saved_at_any_point_resumes_to_the_same_rows(
    tmp_path_factory, sizes, chosen, data, weights
):
    folder = tmp_path_factory.mktemp("data")
    sources = [
        {**source, "weight": weight if size > 2 else 1.0}
        for source, weight, size in zip(files(folder, sizes), weights, sizes, strict=False)
    ]
    straight = stream_of(sources, folder / "cursors", **chosen)
    try:
        rows = content(straight.rows())
    except ConfigError:  # an epoch of half the rows had the bad one alone
        return
    for start in data.draw(st.sets(st.integers(1, len(rows)), min_size=1, max_size=3)):
        resumed = stream_of(sources, folder / "cursors", **chosen)
        assert content(resumed.rows(start)) == rows[start:]
        assert resumed.counts.skipped == straight.counts.skipped
    assert stream_of(sources, **chosen).count_rows() == len(rows)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(counts, run_settings)
def test_the_union_of_packed_documents_is_the_input_each_once(tmp_path_factory, sizes, chosen):
    sources = files(tmp_path_factory.mktemp("data"), sizes)
    stream = stream_of(sources, **chosen)
    found = [
        (row.data_epoch, document.sample_id, document.tag)
        for row in stream.rows()
        for document in row.documents
    ]
    usable = [(k, i) for k, size in enumerate(sizes) for i in range(size)]
    if sizes[0] > 1:
        usable.remove((0, 0))
    assert sorted(found) == sorted(
        (epoch, k << 40 | i, k) for epoch in range(chosen["data_epochs"]) for k, i in usable
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(counts, run_settings, st.data(), st.integers(1, 3), st.integers(1, 3))
def test_the_rings_of_a_run_share_out_its_rows_and_resume_with_another_number_of_them(
    tmp_path_factory, sizes, chosen, data, before, after
):
    folder = tmp_path_factory.mktemp("data")
    sources = files(folder, sizes)
    rows = content(stream_of(sources, **chosen).rows())
    for shard in shards_of(before):
        saved = stream_of(sources, folder / f"target-{shard.index}", **chosen)
        shares = content(saved.rows(shard.to_global(0), shard))
        assert shares == rows[shard.index :: before]
    start = data.draw(st.integers(0, len(rows)))
    for shard in shards_of(after):
        first = shard.to_global(shard.num_below(start))
        resumed = stream_of(sources, folder / f"target-{shard.index}", **chosen)
        assert content(resumed.rows(first, shard)) == rows[first::after]


def test_a_target_that_joins_at_a_resume_goes_on_from_the_cursor_of_another(tmp_path):
    sources = files(tmp_path, [80])
    rows = content(stream_of(sources, tmp_path / "cursors" / "target-0").rows())
    joined = stream_of(sources, tmp_path / "cursors" / "target-1")
    passes = []
    start_pass = joined._source.samples
    joined._source.samples = lambda epoch, place, counts: (
        passes.append(place), start_pass(epoch, place, counts),
    )[1]  # fmt: skip
    shard = shards_of(2)[1]
    assert content(joined.rows(9, shard)) == rows[9::2]
    assert passes[0].positions > (0,)


def test_a_cursor_that_a_target_of_other_data_left_is_passed_over(tmp_path):
    list(stream_of(files(tmp_path, [80]), tmp_path / "cursors" / "target-1").rows())
    sources = files(tmp_path, [70])
    rows = content(stream_of(sources).rows())
    assert content(stream_of(sources, tmp_path / "cursors" / "target-0").rows(9)) == rows[9:]


def test_the_first_row_of_a_ring_takes_no_cursor_of_other_data(tmp_path):
    shard = shards_of(2)[1]
    list(stream_of(files(tmp_path, [30]), tmp_path / "cursors" / "target-1").rows(1, shard))
    sources = files(tmp_path, [20])
    rows = content(stream_of(sources, tmp_path / "cursors" / "target-1").rows(1, shard))
    assert rows == content(stream_of(sources).rows())[1::2]


def test_a_resume_renders_what_is_in_open_rows_and_no_more(tmp_path, monkeypatch):
    sources = files(tmp_path, [300])
    rows = content(stream_of(sources, tmp_path / "cursors").rows())
    resumed = stream_of(sources, tmp_path / "cursors")
    rendered = []
    samples_of = resumed._source.samples_of
    monkeypatch.setattr(
        resumed._source, "samples_of", lambda i, row: (rendered.append(i), samples_of(i, row))[1]
    )
    assert content(islice(resumed.rows(len(rows) // 2), 1)) == [rows[len(rows) // 2]]
    assert len(rendered) < 30


def test_a_run_from_the_first_row_takes_no_cursor_of_other_data(tmp_path):
    list(stream_of(files(tmp_path, [30]), tmp_path / "cursors").rows())
    sources = files(tmp_path, [20])
    rows = content(stream_of(sources, tmp_path / "cursors").rows())
    assert rows == content(stream_of(sources).rows())


@pytest.mark.parametrize(
    "change", [{"row_tokens": 256}, {"packing_window": 2}, {"shuffle": False}, {"seed": 4}, "file"]
)
def test_a_resume_with_other_data_is_refused(tmp_path, change):
    sources = files(tmp_path, [30])
    list(stream_of(sources, tmp_path / "cursors").rows())
    if change == "file":
        sources, change = files(tmp_path, [29]), {}
    with pytest.raises(ConfigError, match=r"is of data .*restore \[data\]"):
        next(stream_of(sources, tmp_path / "cursors", **change).rows(2))


def test_a_cursor_between_the_turns_of_one_conversation_resumes_behind_its_turn(tmp_path):
    dialogues = [
        {"messages": [turn for i in range(3) for turn in turns("dog?", f"fox {number} {i}")]}
        for number in range(4)
    ]
    sources = [{"path": write(tmp_path / "a.jsonl", dialogues)}]
    changes = {"one_row_a_turn": True, "max_documents": 1, "packing_window": 1}
    rows = content(stream_of(sources, tmp_path / "cursors", **changes).rows())
    assert len(rows) == 12
    for start in range(1, 12):
        assert (
            content(stream_of(sources, tmp_path / "cursors", **changes).rows(start)) == rows[start:]
        )


def test_a_torn_cursor_is_passed_over_for_the_one_before(tmp_path, caplog):
    sources, folder = files(tmp_path, [60]), tmp_path / "cursors"
    rows = content(stream_of(sources, folder).rows())
    (folder / f"{4:012}.json").write_text('{"sequence"')
    assert content(stream_of(sources, folder).rows(4)) == rows[4:]
    assert "passed over" in caplog.text


def test_cursors_that_no_resume_can_need_are_deleted(tmp_path):
    settled, folder = Settled(), tmp_path / "cursors"
    rows = stream_of(files(tmp_path, [80]), folder, settled).rows()
    for row in rows:
        settled.below = max(0, row.sequence - 3)
    kept = sorted(int(path.stem) for path in folder.iterdir())
    assert len(kept) <= 6
    assert kept[0] <= settled.below


def test_rows_of_large_files_are_not_counted_ahead(tmp_path):
    assert stream_of(files(tmp_path, [3]), count_ahead_bytes=10).count_rows() is None


def test_tags_number_the_names_of_the_sources(tmp_path):
    first, second, third = files(tmp_path, [4, 4, 4])
    source = conversations(
        None, sources=[first | {"tag": "code"}, second | {"tag": "chat"}, third | {"tag": "code"}]
    )
    tags = {sample.sample_id >> 40: sample.tag for sample in source.samples(0)}
    assert tags == {0: 0, 1: 1, 2: 0}


def test_sources_are_evenly_mixed_to_the_end(tmp_path):
    sources = files(tmp_path, [600, 200], (".jsonl", ".jsonl"))
    order = [sample.sample_id >> 40 for sample in conversations(None, sources=sources).samples(0)]
    for quarter in np.array_split(np.asarray(order), 4):
        assert 0.15 < quarter.mean() < 0.35


def test_weights_say_how_often_an_epoch_has_a_row(tmp_path):
    rows = [{"messages": turns(answer=f"fox {i}")} for i in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    for weight, epochs in ((0.25, 4), (2.0, 1), (0.5, 2)):
        source = conversations(None, sources=[{"path": path, "weight": weight}])
        seen = [s.sample_id for epoch in range(epochs) for s in source.samples(epoch)]
        assert sorted(seen) == sorted(list(range(40)) * int(weight * epochs))
        assert len(list(source.samples(0))) == 40 * weight


def test_a_cursor_file_is_small(tmp_path):
    list(islice(stream_of(files(tmp_path, [80]), tmp_path / "cursors").rows(), 4))
    cursor = json.loads((tmp_path / "cursors" / f"{3:012}.json").read_text())
    assert "token_ids" not in cursor
    assert len(json.dumps(cursor)) < 1000
