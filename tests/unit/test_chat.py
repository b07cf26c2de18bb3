"""Conversations become the template's own ids, and the mask is 1 on what the assistant wrote."""

import pytest

from common.errors import RowRejectedError
from common.target.chat import render_conversation, render_prompt, template_fingerprint
from tests.targets import CHATML, make_tiny_tokenizer

# Inserts an empty think block in the last turn, drops the reasoning of earlier ones.
THINKING = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}{% set thought = '' %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}"
    "{% endif %}"
    "{{ content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Trims texts, puts a blank before the end of a turn, refuses system messages.
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '[' + message['role'] + '] ' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ ' <|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}{{ '<call>' + call.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def supervised_text(messages, template=CHATML, **options):
    tokenizer = make_tiny_tokenizer(template)
    rendered = render_conversation(tokenizer, messages, {}, **options)
    pieces, previous = [], 0
    for token, supervised in zip(rendered.token_ids, rendered.loss_mask, strict=True):
        if supervised and not previous:
            pieces.append([])
        if supervised:
            pieces[-1].append(token)
        previous = supervised
    return [tokenizer.decode(piece) for piece in pieces]


def rejection(messages, template=CHATML):
    with pytest.raises(RowRejectedError) as caught:
        render_conversation(make_tiny_tokenizer(template), messages, {})
    return caught.value.reason


def test_ids_are_those_of_the_template():
    tokenizer = make_tiny_tokenizer()
    messages = [user("the dog?"), assistant("the quick fox")]
    expected = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert render_conversation(tokenizer, messages, {}).token_ids == expected


def test_prompt_ends_where_the_assistant_begins():
    tokenizer = make_tiny_tokenizer()
    prompt = render_prompt(tokenizer, [user("the dog?")], {})
    whole = render_conversation(tokenizer, [user("the dog?"), assistant("fox")], {})
    assert whole.token_ids[: len(prompt)] == prompt
    assert whole.loss_mask.index(1) == len(prompt)


def test_text_and_end_of_turn_are_supervised_and_headers_are_not():
    messages = [user("a"), assistant("the quick fox"), user("b"), assistant("lazy é\U0001f600\n")]
    assert supervised_text(messages) == [
        "the quick fox<|im_end|>",
        "lazy é\U0001f600\n<|im_end|>",
    ]


def test_text_that_looks_like_a_header_is_found_in_its_place():
    assert supervised_text([user("assistant"), assistant("assistant\n")]) == [
        "assistant\n<|im_end|>"
    ]


def test_end_of_turn_of_a_cut_answer_is_not_supervised():
    messages = [user("a"), assistant("fox"), user("b"), assistant("the lazy")]
    assert supervised_text(messages, last_turn_was_cut=True) == ["fox<|im_end|>", "the lazy"]


def test_inserted_think_block_is_not_supervised():
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
    assert supervised_text(messages, THINKING) == ["fox<|im_end|>", "dog<|im_end|>"]


def test_every_reasoning_token_that_the_render_shows_is_supervised():
    thought = "<think>\nthe lazy dog\n</think>\n\n"
    messages = [user("a"), assistant(thought + "fox"), user("b"), assistant(thought + "dog")]
    assert supervised_text(messages, THINKING) == [
        "fox<|im_end|>",
        thought + "dog<|im_end|>",
    ]


def test_trimmed_text_and_a_blank_before_the_end_of_turn_are_understood():
    messages = [user("a"), assistant("  the fox \n"), user("b"), assistant("dog")]
    # The blank behind the header is part of the token that the assistant writes.
    assert supervised_text(messages, TRIMMING)[:2] == [" the fox", "<|im_end|>"]


def test_tool_calls_are_supervised_and_tool_results_are_not():
    messages = [
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": [{"name": "the fox"}]},
        {"role": "tool", "content": "quick"},
        assistant("dog"),
    ]
    assert supervised_text(messages, TOOLS) == ["<call>the fox<|im_end|>", "dog<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("text", "no_messages"),
        ([], "no_messages"),
        ([{"role": "narrator", "content": "a"}], "bad_role"),
        (["a"], "bad_role"),
        ([user(None)], "bad_content"),
        ([user("a")], "no_assistant_turn"),
        ([user("a"), assistant(" \n")], "empty_assistant_turn"),
    ],
)
def test_unusable_messages_are_rejected_with_a_reason(messages, reason):
    assert rejection(messages) == reason


def test_row_that_the_template_refuses_is_rejected():
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("b")]
    assert rejection(messages, TRIMMING) == "template_rejected"


def test_template_that_rewrites_the_text_is_rejected():
    template = CHATML.replace("message['content']", "message['content'] | upper")
    assert rejection([user("a"), assistant("fox")], template) == "template_alters_text"


def test_two_bos_tokens_are_rejected():
    template = "{{ bos_token + bos_token }}" + CHATML
    assert rejection([user("a"), assistant("fox")], template) == "double_bos"


def test_template_fingerprint_follows_template_arguments_and_vocabulary():
    tokenizer = make_tiny_tokenizer()
    first = template_fingerprint(tokenizer, {})
    assert first == template_fingerprint(make_tiny_tokenizer(), {})
    tokenizer(["a", "the dog"], padding=True)
    assert template_fingerprint(tokenizer, {}) == first
    assert template_fingerprint(tokenizer, {"enable_thinking": False}) != first
    assert template_fingerprint(make_tiny_tokenizer(THINKING), {}) != first
    tokenizer.add_tokens(["<extra>"])
    assert template_fingerprint(tokenizer, {}) != first
