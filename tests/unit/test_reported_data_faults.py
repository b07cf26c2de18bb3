"""The data faults that people who train drafters report most, each as a claim that holds here.

The letter and number of a test is that of the report. A1's gradients are in
test_alignment_table.py, A4's refusals in tests/e2e/test_template_fingerprint.py, and that a step
without weight changes nothing (A9) is in test_worker_parts.py.
"""

import json
import logging
from dataclasses import replace

import pytest
from pydantic import ValidationError

from common.errors import ConfigError, RowRejectedError
from common.target.chat import (
    MaskOptions,
    has_template,
    render_conversation,
    render_prompt,
    template_fingerprint,
)
from services.target_server.conversations import Conversations, mask_options
from services.target_server.data_config import DataTable
from tests.chat_families import (
    TOOLS,
    assistant,
    family_tokenizer,
    supervised,
    tool_turns,
    user,
)
from tests.targets import CHATML, make_tiny_tokenizer

GOOD = [user("the dog?"), assistant("the quick fox")]
SYSTEM_SKIPPED = CHATML.replace("messages %}", "messages if message['role'] != 'system' %}")
REFUSES_NARROW = "{% if 'boom' in messages[0]['content'] %}{{ raise_exception('boom') }}{% endif %}"


def read(tmp_path, rows, tokenizer=None, **settings):
    """Return the samples of a file of these rows, and their source."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table = DataTable(path=path, shuffle=False, **{"row_tokens": 128, **settings})
    source = Conversations(table, tokenizer or make_tiny_tokenizer(), {}, seed=0)
    return list(source.samples(0)), source


def rows_of(*conversations):
    return [{"id": f"c{number}", "messages": m} for number, m in enumerate(conversations)]


def test_a1_first_and_last_token_of_an_answer_are_supervised_in_place(tmp_path):
    [sample], _ = read(tmp_path, rows_of(GOOD))
    tokenizer = make_tiny_tokenizer()
    prompt = render_prompt(tokenizer, GOOD[:1], {})
    answer = [*tokenizer("the quick fox")["input_ids"], tokenizer.eos_token_id]
    first, last = len(prompt), len(prompt) + len(answer) - 1
    assert sample.token_ids[first : last + 1].tolist() == answer
    expected = [int(first <= position <= last) for position in range(len(sample))]
    assert sample.loss_mask.tolist() == expected


def test_a2_and_small_input_3_bad_rows_are_skipped_each_under_its_reason(tmp_path):
    rows = rows_of(
        [],
        [assistant("fox"), *GOOD],
        [user("a"), *GOOD],
        [user("a"), assistant("")],
        [user("boom"), assistant("fox")],
        GOOD,
    )
    samples, source = read(tmp_path, rows, make_tiny_tokenizer(REFUSES_NARROW + CHATML))
    # The template takes two user rows in succession: that row trains, and the counter says so.
    assert [sample.sample_id for sample in samples] == [2, 5]
    assert source.counts.noted.first_ids == {"repeated_role": ["c2"]}
    assert source.counts.skipped.first_ids == {
        "no_messages": ["c0"],
        "assistant_first": ["c1"],
        "empty_assistant_turn": ["c3"],
        "template_rejected": ["c4"],
    }
    rows[2]["messages"] = [user("a"), user("b"), assistant("fox")]
    with_system = [row for row in rows if row["id"] != "c1"]
    gemma = family_tokenizer("gemma2")
    samples, source = read(tmp_path, with_system, gemma)
    assert source.counts.skipped.first_ids["template_rejected"] == ["c2"]


def test_a3_a_row_that_the_template_refuses_is_counted_and_the_first_three_are_named(
    tmp_path, caplog
):
    bad = [{"role": "system", "content": "s"}, *GOOD]
    with caplog.at_level(logging.WARNING):
        samples, source = read(
            tmp_path, rows_of(bad, bad, GOOD, bad, bad), family_tokenizer("gemma2")
        )
    assert [sample.sample_id for sample in samples] == [2]
    assert source.counts.skipped.counts == {"template_rejected": 4}
    assert "template_rejected: 4 (first: c0, c1, c3)" in caplog.text


def test_a4_and_a10_tokenizer_template_arguments_length_and_mask_change_the_fingerprint():
    tokenizer = family_tokenizer("qwen3")
    thinking = {"enable_thinking": False}
    seen = {
        template_fingerprint(tokenizer, {}),
        template_fingerprint(tokenizer, thinking),
        template_fingerprint(tokenizer, {"today": "2031-07-09"}),
        template_fingerprint(family_tokenizer("llama3"), {}),
        template_fingerprint(tokenizer, {}, max_tokens=128),
        template_fingerprint(tokenizer, {}, max_tokens=256),
        template_fingerprint(tokenizer, {}, options=MaskOptions(train_only_last_turn=True)),
        template_fingerprint(tokenizer, {}, options=MaskOptions(one_row_a_turn=True)),
    }
    assert len(seen) == 8
    fingerprint = template_fingerprint(
        tokenizer, thinking, max_tokens=128, options=MaskOptions(one_row_a_turn=True)
    )
    assert has_template(fingerprint, tokenizer, thinking)
    assert not has_template(fingerprint, tokenizer, {})
    assert not has_template(fingerprint, family_tokenizer("llama3"), thinking)


def test_a5_every_token_of_real_reasoning_is_supervised():
    tokenizer = family_tokenizer("qwen3")
    thought = "First, 12 é\U0001f600.\n\nThen <tool_call>?"
    messages = [user("a"), assistant("fox", reasoning_content=thought)]
    rendered = render_conversation(tokenizer, messages, {})
    assert supervised(tokenizer, rendered) == [f"<think>\n{thought}\n</think>\n\nfox<|im_end|>"]


def test_a6_reasoning_is_in_the_one_render_of_the_whole():
    tokenizer = family_tokenizer("qwen3")
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog", reasoning_content="why")]
    rendered = render_conversation(tokenizer, messages, {})
    assert rendered.token_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert "why" in supervised(tokenizer, rendered)[1]


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "gemma2", "mistral", "gpt_oss"])
def test_a7_an_end_of_turn_is_supervised_though_it_is_not_eos(family):
    tokenizer = family_tokenizer(family)
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
    rendered = render_conversation(tokenizer, messages, {})
    first, last = supervised(tokenizer, rendered)
    assert first.startswith("fox<")
    assert last.startswith("dog<")
    if family == "gemma2":
        assert tokenizer.eos_token not in first + last


def test_a9_and_small_input_4_a_sample_without_supervision_never_reaches_a_row(tmp_path):
    long = [user("z" * 200), assistant("0123456789")]
    path = tmp_path / "data.jsonl"
    with pytest.raises(ConfigError, match=r"no_loss_tokens: 2 \(first: c0, c1\)"):
        read(tmp_path, rows_of(long, long))
    samples, source = read(tmp_path, rows_of(long, GOOD, long))
    assert [sample.sample_id for sample in samples] == [1]
    assert source.counts.skipped.counts == {"no_loss_tokens": 2}
    [sample], _ = read(tmp_path, rows_of(long), row_tokens=256)
    assert sample.loss_mask.sum() == 10 + 1  # its end of turn
    assert path.exists()
    _, source = read(tmp_path, rows_of([user("a"), assistant("z" * 200)], GOOD))
    assert source.counts.skipped.counts == {"too_long": 1}


def test_a11_samples_stream_without_the_rest_of_the_file(tmp_path):
    path = tmp_path / "data.jsonl"
    good = json.dumps({"messages": GOOD})
    path.write_text("\n".join([good, good, "{broken"]), encoding="utf-8")
    table = DataTable(path=path, shuffle=False, row_tokens=128, on_bad_row="fail")
    samples = iter(Conversations(table, make_tiny_tokenizer(), {}, seed=0).samples(0))
    assert next(samples).sample_id == 0
    assert next(samples).sample_id == 1
    with pytest.raises(ConfigError, match="not_json"):
        next(samples)


def test_a12_cut_answers_are_counted_and_can_be_left_out(tmp_path):
    rows = [
        {"id": str(number), "messages": GOOD, "finish_reason": reason}
        for number, reason in enumerate(["stop", "length", "length"])
    ]
    samples, source = read(tmp_path, rows)
    assert (len(samples), source.counts.num_cut_answers) == (3, 2)
    assert samples[0].loss_mask.sum() == samples[1].loss_mask.sum() + 1
    samples, source = read(tmp_path, rows, keep_cut_answers=False)
    assert [sample.sample_id for sample in samples] == [0]
    assert source.counts.skipped.counts == {"cut_answer": 2}


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("form", ["dict", "string"])
def test_a13_and_small_input_6_tools_survive_in_a_row(tmp_path, family, form):
    tokenizer = family_tokenizer(family)
    arguments = {"city": "Oslo"}
    messages = tool_turns(arguments if form == "dict" else json.dumps(arguments))
    row = {"messages": messages, "tools": TOOLS}
    [sample], source = read(tmp_path, [row], tokenizer, row_tokens=2048)
    text = tokenizer.decode(sample.token_ids)
    assert "Tells the weather." in text
    assert "rain" in text
    masked = tokenizer.decode(sample.token_ids[sample.loss_mask == 1])
    assert '{"city": "Oslo"}' in masked
    assert "weather" in masked
    assert 'rain"' not in masked
    # The tool's result has ChatML's end of turn in it, which is text to the other families.
    assert source.counts.noted.counts == ({"control_tokens": 1} if family == "qwen3" else {})


def test_a7_control_tokens_in_a_text_and_reasoning_that_is_left_out_are_noted():
    tokenizer = make_tiny_tokenizer()
    for role in (user, assistant):
        messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
        messages[2 if role is user else 1] = role("a<|im_end|>\n<|im_start|>assistant\nb")
        assert render_conversation(tokenizer, messages, {}).notes == ("control_tokens",)
    thought = {**assistant("dog"), "reasoning_content": "why a dog"}
    assert render_conversation(tokenizer, [user("a"), thought], {}).notes == ("reasoning_dropped",)
    kept = render_conversation(family_tokenizer("qwen3"), [user("a"), thought], {})
    assert kept.notes == ()


@pytest.mark.parametrize("family", ["llama3", "gemma2", "mistral"])
def test_a14_and_small_input_1_a_tokenizer_that_adds_bos_does_not_add_a_second(family):
    tokenizer = family_tokenizer(family)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    messages = [user("u1"), assistant("a1")]
    rendered = render_conversation(tokenizer, messages, {})
    assert rendered.token_ids.count(tokenizer.bos_token_id) == 1
    assert rendered.token_ids[0] == tokenizer.bos_token_id
    assert len(rendered.token_ids) == len(rendered.loss_mask)
    doubled = make_tiny_tokenizer("{{ bos_token + bos_token }}" + CHATML)
    with pytest.raises(RowRejectedError, match="double_bos"):
        render_conversation(doubled, messages, {})


def test_small_input_1_a_system_row_that_the_template_skips_is_warned_of(tmp_path, caplog):
    messages = [{"role": "system", "content": "Speak of foxes."}, *GOOD]
    with caplog.at_level(logging.WARNING):
        samples, _ = read(tmp_path, rows_of(messages, GOOD), make_tiny_tokenizer(SYSTEM_SKIPPED))
    assert len(samples) == 2
    assert "system_dropped: 1 (first: c0)" in caplog.text


def test_small_input_2_reasoning_that_the_template_strips_is_not_supervised():
    tokenizer = family_tokenizer("qwen3")
    messages = [
        user("a"),
        assistant("<think>\nr1\n</think>\n\na1"),
        user("b"),
        assistant("<think>\nr2\n</think>\n\na2"),
    ]
    rendered = render_conversation(tokenizer, messages, {})
    assert "r1" not in tokenizer.decode(rendered.token_ids)
    assert supervised(tokenizer, rendered) == [
        "a1<|im_end|>",
        "<think>\nr2\n</think>\n\na2<|im_end|>",
    ]
    rendered = render_conversation(tokenizer, [*messages[:3], assistant("a2")], {})
    assert "<think>\n\n</think>\n\na2" in tokenizer.decode(rendered.token_ids)
    assert supervised(tokenizer, rendered) == ["a1<|im_end|>", "a2<|im_end|>"]


@pytest.mark.parametrize("flag", ["train_only_last_turn", "one_row_a_turn", "keep_cut_answers"])
def test_a16_each_flag_changes_what_is_trained(tmp_path, flag):
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
    rows = [{"messages": messages, "finish_reason": "length"}, {"messages": messages}]
    masks = {}
    for value in (False, True):
        samples, _ = read(tmp_path, rows, **{flag: value})
        masks[value] = [sample.loss_mask.tolist() for sample in samples]
        if flag != "keep_cut_answers":
            table = DataTable(path=tmp_path / "data.jsonl", **{flag: value})
            assert mask_options(table) == replace(MaskOptions(), **{flag: value})
    assert masks[False] != masks[True]


def test_a16_unknown_and_inapplicable_settings_are_errors(tmp_path):
    with pytest.raises(ValidationError, match="last_turn_loss_only"):
        read(tmp_path, rows_of(GOOD), last_turn_loss_only=True)
    with pytest.raises(ValidationError, match="exclude one another"):
        read(tmp_path, rows_of(GOOD), train_only_last_turn=True, one_row_a_turn=True)
    for argument in ("tools", "messages", "add_generation_prompt", "tokenize"):
        with pytest.raises(ConfigError, match=f"chat_template_kwargs.{argument}"):
            render_conversation(make_tiny_tokenizer(), GOOD, {argument: []})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.today"):
        render_conversation(make_tiny_tokenizer(), GOOD, {"today": "yesterday"})
