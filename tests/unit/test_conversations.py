"""A poisoned file ends no run: what cannot be used is skipped, counted and named."""

import contextlib
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, RowRejectedError
from services.target_server.counts import SampleCounts
from tests.conversation_files import conversations, turns, write

ANSWERED = turns()
POISON = {
    "not_json": ["{not json", "[1, 2]", "[" * 100_000, "1" * 6000],
    "bad_utf8": [b'{"messages": "\xff"}', json.dumps({"messages": turns(answer="\ud800 dog")})],
    "empty_line": ["", " \t"],
    "no_messages": [{"id": "no-messages"}, {"messages": []}, {"messages": "dog"}, {"messages": {}}],
    "bad_role": [{"messages": [{"role": "narrator", "content": "a"}]}, {"messages": ["dog"]}],
    "bad_content": [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
    "bad_tool_call": [
        *({"messages": [{"role": "assistant", "tool_calls": calls}]} for calls in (3, [3], [{}])),
        {"conversations": [{"from": "function_call", "value": "{"}]},
        {"conversations": [{"from": "function_call", "value": "[" * 100_000}]},
    ],
    "bad_tools": [{"messages": ANSWERED, "tools": "{"}, {"messages": ANSWERED, "tools": 3}],
    "no_assistant_turn": [{"messages": turns()[:1]}, {"prompt": "the dog"}],
    "empty_assistant_turn": [{"messages": turns(answer=" ")}],
    "too_long": [{"messages": turns(answer="fox " * 200)}],
    "no_loss_tokens": [
        {"messages": turns(answer="x"), "finish_reason": "length"},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
    ],
    "bad_ids": [
        {"input_ids": ids, "loss_mask": [1, 1]}
        for ids in ([], "ab", 3, [1.5, 2.5], [[1], [2]], [[1], 2], [10**30, 1], ["a", 1])
    ],
    "bad_mask": [{"input_ids": [5, 6], "loss_mask": m} for m in (None, [1], [1, 2], [1, -1], [])],
    "id_outside_vocabulary": [
        {"input_ids": ids, "loss_mask": [1, 1]} for ids in ([5, 300_000], [-1, 5], [5, 2**40])
    ],
    "double_bos": [{"input_ids": [0, 0, 5, 6], "loss_mask": [0, 0, 1, 1]}],
}


def test_arguments_too_deep_to_read_stay_as_the_assistant_wrote_them(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    rows = [
        {"messages": [turns()[0], {"role": "assistant", "tool_calls": [call]}]},
        {"messages": turns()},
    ]
    source = conversations(write(tmp_path / "data.jsonl", rows))
    assert 1 in [sample.sample_id for sample in source.samples(0)]


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_text_that_no_row_can_hold_is_not_tokenized(tmp_path, monkeypatch, as_parts):
    text = "fox " * 3_000_000
    answer = [{"type": "text", "text": text}] if as_parts else text
    source = conversations(write(tmp_path / "data.jsonl", [{"messages": turns(answer=answer)}]))
    monkeypatch.setattr("services.target_server.conversations.render_samples", None)
    with pytest.raises(RowRejectedError, match=r"got 120000\d\d characters"):
        source.read(0)


@pytest.mark.parametrize("reason", POISON)
def test_what_cannot_be_used_is_counted_under_its_reason(tmp_path, reason):
    rows = [*POISON[reason], {"messages": turns()}]
    counts = SampleCounts()
    source = conversations(write(tmp_path / "data.jsonl", rows))
    (sample,) = source.samples(0, counts=counts)
    assert sample.sample_id == len(rows) - 1
    assert counts.skipped.counts == {reason: len(POISON[reason])}


def test_the_first_ids_of_each_reason_are_kept_and_shown(tmp_path, caplog):
    rows = [{"id": f"long-{i}", "messages": turns(answer="fox " * 200)} for i in range(5)]
    rows += ["x", {"messages": turns()}]
    source = conversations(write(tmp_path / "data.jsonl", rows), shuffle=False)
    counts = SampleCounts()
    with caplog.at_level(logging.WARNING):
        assert len(list(source.samples(0, counts=counts))) == 1
    assert counts.skipped.first_ids["too_long"] == ["long-0", "long-1", "long-2"]
    assert "too_long: 5 (first: long-0, long-1, long-2)" in str(counts.skipped)
    assert f"{tmp_path / 'data.jsonl'} line 1, conversation 'long-0'" in caplog.text
    assert "'long-1'" not in caplog.text
    assert "data.jsonl line 6" in str(counts.skipped)


@pytest.mark.parametrize("weight", [1.0, 0.5, 2.0])
def test_later_passes_count_nothing_twice(tmp_path, weight):
    path = write(tmp_path / "data.jsonl", ["x", "y", *[{"messages": turns()}] * 10])
    source = conversations(None, sources=[{"path": path, "weight": weight}])
    counts = SampleCounts()
    for data_epoch in range(4):
        for _ in source.samples(data_epoch, counts=counts):
            pass
    assert counts.skipped.counts == {"not_json": 2}


def test_bad_row_ends_the_run_where_asked(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"messages": turns()}, {"id": "b", "messages": []}])
    with pytest.raises(
        ConfigError, match=r"data\.jsonl line 2, conversation 'b': no_messages.*on_bad_row"
    ):
        list(conversations(path, on_bad_row="fail").samples(0))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "conversations", "prompt", "input_ids", "loss_mask", "role", "from",
                 "content", "value", "tool_calls", "function", "name", "arguments", "tools", "id",
                 "system", "finish_reason", "reasoning_content", "text"]
            ),
            inner | st.sampled_from(["user", "assistant", "human", "gpt", "tool", "system"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=60) | json_values.map(json.dumps), max_size=8))
def test_no_row_raises_anything_but_its_rejection(tmp_path_factory, rows):
    path = write(
        tmp_path_factory.mktemp("random") / "data.jsonl",
        [*(row.replace(b"\n", b"") if isinstance(row, bytes) else row for row in rows),
         {"messages": turns()}],
    )  # fmt: skip
    counts = SampleCounts()
    used = len(list(conversations(path).samples(0, counts=counts)))
    assert used + counts.skipped.total == len(rows) + 1


message_lists = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | json_values},
        optional=dict.fromkeys(("content", "tool_calls", "thinking", "name"), json_values),
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def one_conversation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return conversations(write(folder / "data.jsonl", [{"messages": turns()}]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(message_lists)
def test_no_message_raises_anything_but_its_rejection(one_conversation, messages):
    with contextlib.suppress(RowRejectedError):
        assert one_conversation.samples_of(0, {"messages": messages})


def test_a_sample_is_read_again_by_its_id(tmp_path):
    rows = [{"messages": turns(answer=f"fox {i}")} for i in range(9)]
    source = conversations(write(tmp_path / "data.jsonl", rows))
    for sample in source.samples(0):
        (again,) = source.read(sample.sample_id)
        assert again.token_ids.tolist() == sample.token_ids.tolist()


def test_cut_answers_are_counted_and_can_be_left_out(tmp_path):
    cut = {"messages": turns(), "finish_reason": "length"}
    whole = {"messages": turns(), "finish_reason": "stop"}
    path = write(tmp_path / "data.jsonl", [cut, whole])
    counts = SampleCounts()
    first, second = conversations(path, shuffle=False).samples(0, counts=counts)
    assert counts.num_cut_answers == 1
    assert first.loss_mask.sum() == second.loss_mask.sum() - 1
    assert len(list(conversations(path, keep_cut_answers=False).samples(0))) == 1


def test_empty_file_is_a_config_error(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"data\.path"):
        conversations(path)


@pytest.mark.parametrize("rows", [["x", "y"], ["", ""]])
def test_file_without_a_usable_row_is_a_config_error(tmp_path, rows):
    source = conversations(write(tmp_path / "data.jsonl", rows))
    with pytest.raises(ConfigError, match=r"none of the 2 conversations.*: 2"):
        list(source.samples(0))
