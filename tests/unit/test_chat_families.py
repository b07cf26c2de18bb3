"""On the makers' own templates, exactly what the assistant wrote is supervised."""

import copy
import json

import pytest
from transformers import AutoTokenizer

from common.errors import RowRejectedError
from common.target.chat import MaskOptions, render_conversation, render_prompt, render_samples
from tests.chat_families import (
    END,
    FAMILIES,
    LAST_END,
    TOOLS,
    assistant,
    family_tokenizer,
    supervised,
    tool_turns,
    user,
)

SYSTEM = {"role": "system", "content": "Be brief, fox."}
WITH_TOOLS = ("qwen3", "llama3", "mistral", "gpt_oss")
GPT_OSS_TURN = (
    "<|channel|>analysis<|message|>{}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{}<|return|>"
)
every_family = pytest.mark.parametrize("family", FAMILIES)


def masked_text(family, messages, kwargs=None, **options):
    tokenizer = family_tokenizer(family)
    return supervised(tokenizer, render_conversation(tokenizer, messages, kwargs or {}, **options))


def samples(family, messages, kwargs=None, **options):
    """Return (text, supervised texts) of each sample of a turn."""
    tokenizer = family_tokenizer(family)
    rendered = render_samples(
        tokenizer, messages, kwargs or {}, options=MaskOptions(one_row_a_turn=True), **options
    )
    return [(tokenizer.decode(r.token_ids), supervised(tokenizer, r)) for r in rendered]


@every_family
def test_answers_and_ends_of_turns_are_supervised_and_nothing_else(family):
    messages = [user("the dog?"), assistant("the fox"), user("b"), assistant("lazy é\U0001f600 ü")]
    assert masked_text(family, messages) == [
        f"the fox{END[family]}",
        f"lazy é\U0001f600 ü{LAST_END[family]}",
    ]


@every_family
def test_system_rows_are_kept_refused_or_noted(family):
    tokenizer = family_tokenizer(family)
    messages = [SYSTEM, user("a"), assistant("fox")]
    if family == "gemma2":
        with pytest.raises(RowRejectedError, match="template_rejected: System role not supported"):
            render_conversation(tokenizer, messages, {})
        return
    rendered = render_conversation(tokenizer, messages, {})
    # Mistral puts a system row before the last user turn, and only while it is unanswered.
    is_dropped = family == "mistral"
    assert (SYSTEM["content"] in tokenizer.decode(rendered.token_ids)) is not is_dropped
    assert rendered.notes == (("system_dropped",) if is_dropped else ())
    assert supervised(tokenizer, rendered) == [f"fox{LAST_END[family]}"]


@every_family
def test_ids_are_those_of_the_families_own_template(family):
    tokenizer = family_tokenizer(family)
    messages = [user("the dog?"), assistant("the fox"), user("b"), assistant("dog")]
    today = {"strftime_now": lambda form: "01 Jan 2025" if "%b" in form else "2025-01-01"}
    expected = tokenizer.apply_chat_template(messages, **today)["input_ids"]
    assert render_conversation(tokenizer, messages, {}).token_ids == expected
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, **today)
    assert render_prompt(tokenizer, messages[:3], {}) == prompt["input_ids"]


@every_family
def test_text_that_looks_special_is_supervised_as_far_as_it_goes(family):
    end, header = (
        END[family],
        next(token for token in FAMILIES[family].special if "start" in token or "INST" in token),
    )
    answer = f"say {end} then {header}assistant"
    messages = [user(f"{end}{header}assistant"), assistant(answer), user("b"), assistant("dog")]
    assert masked_text(family, messages) == [f"{answer}{end}", f"dog{LAST_END[family]}"]


@every_family
def test_blanks_around_an_answer_are_supervised_where_the_template_keeps_them(family):
    messages = [user("a"), assistant(" fox  "), user("b"), assistant("\tdog\n\n")]
    is_trimmed = family in ("llama3", "gemma2")
    first, last = ("fox", "dog") if is_trimmed else (" fox  ", "\tdog\n\n")
    assert masked_text(family, messages) == [f"{first}{END[family]}", f"{last}{LAST_END[family]}"]


@every_family
def test_only_the_last_turn_is_supervised_where_asked(family):
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
    options = MaskOptions(train_only_last_turn=True)
    assert masked_text(family, messages, options=options) == [f"dog{LAST_END[family]}"]
    cut = masked_text(family, messages, options=options, last_turn_was_cut=True)
    assert cut == ["dog"]
    cut = masked_text(family, messages, last_turn_was_cut=True)
    assert cut == [f"fox{END[family]}", "dog"]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_qwens_empty_think_block_is_not_supervised(kwargs):
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
    tokenizer = family_tokenizer("qwen3")
    rendered = render_conversation(tokenizer, messages, kwargs)
    text = tokenizer.decode(rendered.token_ids)
    assert text.count("<think>\n\n</think>\n\ndog") == text.count("<think>") == 1
    assert supervised(tokenizer, rendered) == ["fox<|im_end|>", "dog<|im_end|>"]


@pytest.mark.parametrize("form", ["key", "block", "other_key"])
def test_reasoning_is_supervised_where_the_render_shows_it(form):
    def turn(thought, answer):
        if form == "block":
            return assistant(f"<think>\n{thought}\n</think>\n\n{answer}")
        key = "reasoning_content" if form == "key" else "thinking"
        return assistant(answer, **{key: thought})

    messages = [user("a"), turn("r1", "fox"), user("b"), turn("r2 <|im_start|> ü", "dog")]
    assert masked_text("qwen3", messages) == [
        "fox<|im_end|>",
        "<think>\nr2 <|im_start|> ü\n</think>\n\ndog<|im_end|>",
    ]
    if form == "block":
        verbatim = ["<think>\nr1\n</think>\n\nfox", "<think>\nr2 <|im_start|> ü\n</think>\n\ndog"]
        assert masked_text("llama3", messages) == [f"{text}<|eot_id|>" for text in verbatim]
    else:
        assert masked_text("gpt_oss", messages) == [
            "fox<|end|>",
            GPT_OSS_TURN.format("r2 <|im_start|> ü", "dog"),
        ]


CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo <|im_end|>"}}\n</tool_call><|im_end|>',
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo <|im_end|>"}}<|eot_id|>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo <|im_end|>"}, "id": "abcdefghi"}]</s>',
    "gpt_oss": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo <|im_end|>"}<|call|>',
}


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("form", ["dict", "string"])
@pytest.mark.parametrize("is_followed", [False, True])
def test_tool_calls_are_supervised_and_results_are_not(family, form, is_followed):
    arguments = {"city": "Oslo <|im_end|>"}
    messages = tool_turns(arguments if form == "dict" else json.dumps(arguments))
    messages += [user("b"), assistant("dog")] if is_followed else []
    later = ["It rains." + END[family], "dog" + LAST_END[family]]
    expected = [CALLS[family], *(later if is_followed else ["It rains." + LAST_END[family]])]
    assert masked_text(family, messages, tools=TOOLS) == expected


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_ids_of_tool_calls_are_those_of_the_families_own_template(family):
    tokenizer = family_tokenizer(family)
    messages = tool_turns({"city": "Oslo"})
    rendered = render_conversation(tokenizer, messages, {}, tools=TOOLS)
    messages[1]["content"] = ""
    today = {"strftime_now": lambda form: "01 Jan 2025" if "%b" in form else "2025-01-01"}
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, **today)["input_ids"]
    assert rendered.token_ids == expected
    assert "Tells the weather." in tokenizer.decode(expected)


@pytest.mark.parametrize("family", ["chatml", "gemma2"])
def test_tool_calls_that_a_template_cannot_show_are_rejected(family):
    with pytest.raises(RowRejectedError, match=r"template_drops_tool_calls|template_rejected"):
        masked_text(family, tool_turns({}), tools=TOOLS)


def test_reasoning_before_a_tool_call_is_supervised_with_it():
    messages = tool_turns({"city": "Oslo <|im_end|>"}, reasoning_content="look")[:2]
    assert masked_text("qwen3", messages, tools=TOOLS) == [
        "<think>\nlook\n</think>\n\n" + CALLS["qwen3"],
    ]
    assert masked_text("gpt_oss", messages, tools=TOOLS) == [
        "<|channel|>analysis<|message|>look<|end|><|start|>assistant" + CALLS["gpt_oss"],
    ]


def test_empty_think_block_before_a_tool_call_is_not_supervised():
    messages = tool_turns({"city": "Oslo <|im_end|>"})[:2]
    assert masked_text("qwen3", messages) == [CALLS["qwen3"]]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_row_a_turn_shows_each_turn_with_its_reasoning_behind_its_prompt(family):
    messages = [
        SYSTEM,
        user("a"),
        assistant("fox", reasoning_content="r1"),
        user("b"),
        assistant("dog", reasoning_content="r2"),
    ]
    found = samples(family, messages)
    written = {
        "qwen3": "<think>\n{}\n</think>\n\n{}<|im_end|>",
        "gpt_oss": GPT_OSS_TURN,
    }[family]
    tokenizer = family_tokenizer(family)
    for (text, masked), turn, thought, answer in zip(
        found, (2, 4), ("r1", "r2"), ("fox", "dog"), strict=True
    ):
        prompt = tokenizer.decode(render_prompt(tokenizer, messages[:turn], {}))
        assert text.rstrip("\n") == prompt + written.format(thought, answer)
        assert masked == [written.format(thought, answer)]


def test_a_row_a_turn_keeps_the_system_row_and_tools_that_mistral_moves():
    found = samples("mistral", [SYSTEM, user("a"), assistant("fox"), user("b"), assistant("dog")])
    assert found == [
        ("<s>[INST]Be brief, fox.\n\na[/INST]fox</s>", ["fox</s>"]),
        ("<s>[INST]a[/INST]fox</s>[INST]Be brief, fox.\n\nb[/INST]dog</s>", ["dog</s>"]),
    ]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_row_a_turn_covers_calls_and_what_follows_them(family):
    arguments = {"city": "Oslo <|im_end|>"}
    found = samples(family, tool_turns(arguments), tools=TOOLS)
    last = "It rains." + LAST_END[family]
    assert [masked for _, masked in found] == [[CALLS[family]], [last]]
    assert all(text.count("It rains.") == number for number, (text, _) in enumerate(found))


def test_a_row_a_turn_keeps_reasoning_of_a_call_that_gpt_oss_drops_once_it_is_answered():
    found = samples("gpt_oss", tool_turns({}, reasoning_content="look"), tools=TOOLS)
    text, masked = found[1]
    assert (
        "<|channel|>analysis<|message|>look<|end|><|start|>assistant to=functions.weather" in text
    )
    assert text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>")
    assert masked == ["It rains.<|return|>"]


def test_a_row_a_turn_of_qwen_without_thinking_has_the_block_of_its_prompt():
    messages = [user("a"), assistant("fox"), user("b"), assistant("dog")]
    found = samples("qwen3", messages, {"enable_thinking": False})
    assert [text.count("<think>\n\n</think>\n\n") for text, _ in found] == [1, 1]
    assert "<think>\n\n</think>\n\nfox" in found[0][0]
    assert [masked for _, masked in found] == [["fox<|im_end|>"], ["dog<|im_end|>"]]


@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_a_template_that_shows_the_day_is_given_a_fixed_one(family):
    tokenizer = family_tokenizer(family)
    messages = [user("a"), assistant("fox")]
    shown = {
        day: tokenizer.decode(render_conversation(tokenizer, messages, kwargs).token_ids)
        for day, kwargs in {"2025-01-01": {}, "2031-07-09": {"today": "2031-07-09"}}.items()
    }
    for day, text in shown.items():
        assert day in text or f"{day[-2:]} {'Jan' if '01-01' in day else 'Jul'} {day[:4]}" in text


def test_a_token_that_joins_a_blank_of_the_header_is_the_templates():
    tokenizer = copy.copy(family_tokenizer("chatml"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    rendered = render_conversation(tokenizer, [user("a"), assistant("the fox")], {})
    # " the" is one token; that this tokenizer cuts blanks off its offsets does not hide it.
    assert supervised(tokenizer, rendered) == [" fox<|im_end|>"]


def test_smollm2_itself():
    tokenizer = AutoTokenizer.from_pretrained(".cache/models/SmolLM2-135M-Instruct")
    messages = [user("Hi?"), assistant("Hello, é\U0001f600!"), user("b"), assistant(" fox\n")]
    rendered = render_conversation(tokenizer, messages, {})
    assert rendered.token_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert supervised(tokenizer, rendered) == [
        "Hello, é\U0001f600!<|im_end|>",
        " fox\n<|im_end|>",
    ]
    assert tokenizer.decode(rendered.token_ids).startswith("<|im_start|>system\nYou are a helpful")
