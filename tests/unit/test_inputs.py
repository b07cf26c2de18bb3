"""Every format and kind of file gives the same samples, in an order that needs no list."""

import gzip
import io
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, RowRejectedError
from services.target_server.counts import SampleCounts
from services.target_server.data_config import DataTable
from services.target_server.inputs import readers
from services.target_server.inputs.formats import Pretokenised, read_conversation
from services.target_server.inputs.line_index import line_bounds
from services.target_server.inputs.order import Permutation
from tests.conversation_files import conversations, turns, write

ROWS = [{"id": str(i), "messages": turns(answer=f"fox {i}")} for i in range(30)]


def ids_of(source, data_epoch=0):
    return {s.sample_id: s.token_ids.tolist() for s in source.samples(data_epoch)}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "folder"])
def test_every_kind_of_file_gives_the_samples_of_the_plain_one(tmp_path, name):
    plain = ids_of(conversations(write(tmp_path / "plain.jsonl", ROWS)))
    source = conversations(write(tmp_path / name, ROWS), index_folder=tmp_path / "index")
    assert ids_of(source) == plain
    order = [sample.sample_id for sample in source.samples(0)]
    assert order == [sample.sample_id for sample in source.samples(0)]
    assert order != sorted(order)
    assert order != [sample.sample_id for sample in source.samples(1)]
    for sample_id in (0, 7, 29):
        [sample] = source.read(sample_id)
        assert sample.token_ids.tolist() == plain[sample_id]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "folder"])
def test_without_shuffle_the_order_is_the_files(tmp_path, name):
    source = conversations(write(tmp_path / name, ROWS), shuffle=False, max_conversations=20)
    assert [sample.sample_id for sample in source.samples(3)] == list(range(20))


def test_a_folder_of_files_is_read_by_datasets(tmp_path):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", ROWS[:4])
    assert len(ids_of(conversations(tmp_path / "folder", index_folder=tmp_path / "index"))) == 4


def test_a_folder_that_is_no_dataset_is_a_config_error(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be read as a dataset"):
        conversations(tmp_path / "folder", index_folder=tmp_path / "index")


def test_a_small_buffer_shuffles_a_compressed_file_within_its_reach(tmp_path):
    source = conversations(write(tmp_path / "a.jsonl.gz", ROWS), shuffle_buffer=4)
    order = [sample.sample_id for sample in source.samples(0)]
    assert sorted(order) == list(range(30))
    assert all(row < place + 4 for place, row in enumerate(order))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_broken_archive_gives_what_it_can_and_is_counted(tmp_path, suffix):
    rows = [{"messages": turns(answer=f"{i * 7919 % 10007} fox")} for i in range(4000)]
    path = write(tmp_path / f"a.jsonl{suffix}", rows)
    path.write_bytes(path.read_bytes()[:-2000])
    if suffix == ".zst":  # a truncated frame just ends; one with other bytes is broken
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 400] = b"\xff" * 400
        path.write_bytes(content)
    counts = SampleCounts()
    used = sum(1 for _ in conversations(path, shuffle_buffer=1).samples(0, counts=counts))
    assert counts.skipped.counts["broken_file"] == 1
    assert suffix == ".zst" or used > 1000


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    source = conversations(write(tmp_path / "a.jsonl.gz", ROWS))
    assert len(ids_of(source)) == 30
    (tmp_path / "b.jsonl.zst").write_bytes(b"zst")
    with pytest.raises(ConfigError, match=r"zstandard.*pip install 'ringdraft\[data\]'"):
        list(conversations(tmp_path / "b.jsonl.zst").samples(0))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_other_rows_of_the_same_size_are_another_file(tmp_path, name):
    def fingerprint(folder, last):
        (tmp_path / folder).mkdir()
        rows = [{"id": str(i), "messages": turns(answer=f"fox {i % 7}")} for i in range(3000)]
        rows[2000] = {"id": "2000", "messages": turns(answer=last)}
        return readers.open_reader(write(tmp_path / folder / name, rows), None, 0).fingerprint()

    assert fingerprint("one", "dog") == fingerprint("copy", "dog")
    assert fingerprint("one again", "dog") != fingerprint("other", "god")


def test_a_line_beyond_all_measure_is_skipped_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE_BYTES", 1000)
    rows = [ROWS[0], {"messages": turns(), "unused": "x" * 5000}, ROWS[1]]
    for name in ("a.jsonl", "a.jsonl.gz"):
        counts = SampleCounts()
        source = conversations(write(tmp_path / name, rows), shuffle=False)
        assert [s.sample_id for s in source.samples(0, counts=counts)] == [0, 2]
        assert counts.skipped.counts == {"too_long": 1}


SAME = [
    {"messages": turns()},
    {"conversations": [{"from": "human", "value": "the dog?"}, {"from": "gpt", "value": "the quick fox"}]},
    {"prompt": turns()},
    {"messages": {"role": ["user", "assistant"], "content": ["the dog?", "the quick fox"]}},
    {"messages": [turns()[0], {**turns()[1], "content": [{"type": "text", "text": "the quick"}, " fox"]}]},
    {"messages": [{**turn, "name": None, "tool_calls": None} for turn in turns()], "tools": None},
    {"messages": turns(), "tools": "[]", "conversations": None},
]  # fmt: skip


@pytest.mark.parametrize("row", SAME)
def test_formats_are_one_conversation(tmp_path, row):
    source = conversations(write(tmp_path / "a.jsonl", [row]))
    assert ids_of(source) == ids_of(conversations(write(tmp_path / "b.jsonl", SAME[:1])))


def test_sharegpt_tools_and_system_take_their_places():
    call = {"name": "f", "arguments": {"x": 1}}
    row = {
        "system": "S",
        "tools": json.dumps([{"name": "f"}]),
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "seven"},
        ],
    }
    found = read_conversation(row)
    assert found.tools == [{"name": "f"}]
    assert found.content == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "seven"},
    ]


def test_a_prompt_is_a_user_turn_and_a_named_format_is_asked_for():
    assert read_conversation({"prompt": "a"}).content == [{"role": "user", "content": "a"}]
    with pytest.raises(RowRejectedError, match=r"no_messages.*'conversations'"):
        read_conversation({"messages": turns()}, "sharegpt")


def test_pretokenised_rows_are_used_as_they_are(tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}
    [sample] = conversations(write(tmp_path / "a.jsonl", [row])).samples(0)
    assert sample.token_ids.tolist() == row["input_ids"]
    assert sample.loss_mask.tolist() == row["loss_mask"]
    assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)
    assert isinstance(read_conversation(row).content, Pretokenised)


@settings(deadline=None)
@given(st.integers(1, 1000), st.integers(), st.integers(0, 5))
def test_a_permutation_has_each_number_once(count, seed, epoch):
    order = [Permutation(count, seed, epoch)[i] for i in range(count)]
    assert sorted(order) == list(range(count))


def test_permutations_of_other_keys_differ_and_are_spread():
    first, second = (Permutation(10_000, seed) for seed in (1, 2))
    orders = [[p[i] for i in range(10_000)] for p in (first, second)]
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 10
    steps = np.abs(np.diff(orders[0]))
    assert 3000 < steps.mean() < 3700  # a third of the range, as for numbers drawn at random


@settings(deadline=None)
@given(st.binary(max_size=300).map(lambda b: b.replace(b"a", b"\n")), st.integers(1, 64))
def test_lines_are_those_of_the_file(tmp_path_factory, content, chunk_bytes):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.target_server.inputs.line_index._CHUNK_BYTES", chunk_bytes)
        bounds = line_bounds(path, None)
    lines = [content[a:b] for a, b in pairwise(bounds)]
    assert lines == io.BytesIO(content).readlines()


def test_an_index_is_kept_and_another_file_gets_another(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", ROWS)
    first = line_bounds(path, tmp_path / "index").tolist()
    with monkeypatch.context() as patch:
        patch.setattr("services.target_server.inputs.line_index._scan", None)
        assert line_bounds(path, tmp_path / "index").tolist() == first
    write(path, ROWS[:7])
    assert len(line_bounds(path, tmp_path / "index")) == 8
    for kept in (tmp_path / "index").iterdir():
        kept.write_bytes(b"torn")
    assert len(line_bounds(path, tmp_path / "index")) == 8


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({}, "neither"),
        ({"path": __file__, "sources": [{"path": __file__}]}, "both"),
        ({"path": "nothing.jsonl"}, "no such file"),
        ({"sources": [{"path": __file__, "weight": 0}]}, "greater than 0"),
    ],
)
def test_files_are_named_in_one_way(settings_, message):
    with pytest.raises(ValueError, match=message):
        DataTable(**settings_)


def test_tag_names_are_the_tags_or_the_names_of_the_files(tmp_path):
    for name in ("chat.jsonl.gz", "code.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(b"{}"))
    table = DataTable(
        sources=[
            {"path": tmp_path / "chat.jsonl.gz"},
            {"path": tmp_path / "code.jsonl", "tag": "c"},
        ]
    )
    assert [source.tag_name for source in table.all_sources] == ["chat", "c"]
