"""A poisoned file ends no run: what cannot be used is skipped, counted and named."""

import json
import logging

import pytest

from common.errors import ConfigError, RowRejectedError
from services.target_server.conversations import Conversations
from services.target_server.data_config import DataTable
from tests.targets import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


def turns(question="the dog?", answer="the quick fox"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def conversations(path, seed=0, **settings):
    table = DataTable(path=path, row_tokens=128, **settings)
    return Conversations(table, TOKENIZER, {}, seed)


def test_poisoned_file_yields_its_good_rows_and_counts_the_rest(tmp_path, caplog):
    rows = [
        {"id": "good", "messages": turns(), "tag": 5},
        "{not json",
        "[1, 2]",
        "",
        {"id": "no-messages"},
        {"id": "empty", "messages": []},
        {"id": "role", "messages": [{"role": "narrator", "content": "a"}]},
        {"id": "user-only", "messages": turns()[:1]},
        {"id": "blank", "messages": turns(answer=" ")},
        {"id": "long", "messages": turns(answer="fox " * 200)},
        {"id": "long-2", "messages": turns(answer="dog " * 200)},
        {"id": "tag", "messages": turns(), "tag": "code"},
        {"messages": turns(answer="dog")},
    ]
    source = conversations(write(tmp_path / "data.jsonl", rows), shuffle=False)
    with caplog.at_level(logging.WARNING):
        samples = list(source.samples(0))
    assert [(sample.sample_id, sample.tag) for sample in samples] == [(0, 5), (11, 0)]
    assert source.skipped.counts == {
        "not_json": 2,
        "no_messages": 2,
        "bad_role": 1,
        "no_assistant_turn": 1,
        "empty_assistant_turn": 1,
        "too_long": 2,
        "bad_tag": 1,
    }
    assert source.skipped.first_ids["too_long"] == ["long", "long-2"]
    assert "skipped 10 conversations" in caplog.text
    assert "too_long: 2 (first: long, long-2)" in caplog.text


def test_second_pass_counts_nothing_twice(tmp_path):
    source = conversations(write(tmp_path / "data.jsonl", [{"messages": turns()}, "x"]))
    for data_epoch in range(3):
        assert len(list(source.samples(data_epoch))) == 1
    assert source.skipped.counts == {"not_json": 1}


def test_bad_row_ends_the_run_where_asked(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"messages": turns()}, {"id": "b", "messages": []}])
    with pytest.raises(ConfigError, match=r"conversation 'b': no_messages.*on_bad_row"):
        list(conversations(path, on_bad_row="fail").samples(0))


def test_order_follows_seed_and_data_epoch_only(tmp_path):
    rows = [{"messages": turns()} for _ in range(50)]
    path = write(tmp_path / "data.jsonl", rows)
    first = conversations(path, seed=1)
    assert first.order(0) == conversations(path, seed=1).order(0)
    assert sorted(first.order(0)) == list(range(50))
    assert first.order(0) != first.order(1)
    assert first.order(0) != conversations(path, seed=2).order(0)
    assert conversations(path, shuffle=False).order(3) == list(range(50))


def test_a_sample_is_read_again_by_its_id(tmp_path):
    rows = [{"messages": turns(answer=f"fox {i}")} for i in range(9)]
    source = conversations(write(tmp_path / "data.jsonl", rows))
    for sample in source.samples(0):
        [again] = source.read(sample.sample_id)
        assert again.token_ids.tolist() == sample.token_ids.tolist()


def test_max_conversations_takes_the_first(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"messages": turns()} for _ in range(9)])
    assert {s.sample_id for s in conversations(path, max_conversations=4).samples(0)} == set(
        range(4)
    )


def test_cut_answers_are_counted_and_can_be_left_out(tmp_path):
    cut = {"messages": turns(), "finish_reason": "length"}
    whole = {"messages": turns(), "finish_reason": "stop"}
    path = write(tmp_path / "data.jsonl", [cut, whole])
    source = conversations(path, shuffle=False)
    first, second = source.samples(0)
    assert source.num_cut_answers == 1
    assert first.loss_mask.sum() == second.loss_mask.sum() - 1
    assert len(list(conversations(path, keep_cut_answers=False).samples(0))) == 1


def test_a_single_supervised_token_makes_no_anchor(tmp_path):
    row = {"messages": turns(answer="x"), "finish_reason": "length"}
    source = conversations(write(tmp_path / "data.jsonl", [row]))
    with pytest.raises(RowRejectedError, match="no_loss_tokens"):
        source.read(0)


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_empty_file_is_a_config_error(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"data\.path"):
        conversations(path)


def test_file_without_a_usable_row_is_a_config_error(tmp_path):
    source = conversations(write(tmp_path / "data.jsonl", ["x", "y"]))
    with pytest.raises(ConfigError, match=r"none of its 2 conversations.*not_json: 2"):
        list(source.samples(0))
