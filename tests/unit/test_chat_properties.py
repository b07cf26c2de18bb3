"""Whatever is said, the supervised ids decode to what the assistant said, and to nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.target.chat import MaskOptions, render_conversation, render_samples
from tests.chat_families import (
    END,
    FAMILIES,
    LAST_END,
    assistant,
    family_tokenizer,
    supervised,
    tool_turns,
    user,
)

# A token may join a blank of the header to one of the answer; then it is the template's.
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
ANSWERS = st.builds(lambda a, b: f"a{a} {b}z", WORDS, WORDS)
LOOKALIKES = st.sampled_from(["<|im_end|>", "assistant", "<think>", "[/INST]", "<|channel|>final"])
TURNS = st.lists(
    st.tuples(st.one_of(ANSWERS, LOOKALIKES), ANSWERS, st.one_of(st.just(""), ANSWERS)),
    min_size=1,
    max_size=4,
)
FAMILY = st.sampled_from(sorted(FAMILIES))
some = settings(max_examples=120, deadline=None)


def conversation(turns):
    return [
        message
        for question, answer, thought in turns
        for message in (user(question), assistant(answer, reasoning_content=thought))
    ]


def ends_of(family, turns):
    return [*[END[family]] * (len(turns) - 1), LAST_END[family]]


@some
@given(FAMILY, TURNS)
def test_supervised_ids_decode_to_the_answers(family, turns):
    turns = [(question, answer, "") for question, answer, _ in turns]
    tokenizer = family_tokenizer(family)
    rendered = render_conversation(tokenizer, conversation(turns), {})
    expected = [turn[1] + end for turn, end in zip(turns, ends_of(family, turns), strict=True)]
    assert supervised(tokenizer, rendered) == expected


@some
@given(FAMILY, TURNS)
def test_reasoning_is_supervised_exactly_where_it_is_in_the_render(family, turns):
    tokenizer = family_tokenizer(family)
    rendered = render_conversation(tokenizer, conversation(turns), {})
    masked = supervised(tokenizer, rendered)
    assert len(masked) == len(turns)
    is_shown = family in ("qwen3", "gpt_oss")
    for number, (text, (_, answer, thought), end) in enumerate(
        zip(masked, turns, ends_of(family, turns), strict=True)
    ):
        assert text.endswith(answer + end)
        has_thought = bool(thought) and is_shown and number == len(turns) - 1
        assert (len(text) > len(answer + end)) is has_thought
        assert thought in text or not has_thought


@some
@given(FAMILY, TURNS)
def test_a_row_a_turn_supervises_every_turn_once(family, turns):
    tokenizer = family_tokenizer(family)
    options = MaskOptions(one_row_a_turn=True)
    parts = render_samples(tokenizer, conversation(turns), {}, options=options)
    assert len(parts) == len(turns)
    for part, (_, answer, thought) in zip(parts, turns, strict=True):
        [text] = supervised(tokenizer, part)
        assert text.endswith(answer + LAST_END[family])
        assert thought in text or family not in ("qwen3", "gpt_oss")


@some
@given(st.sampled_from(["qwen3", "llama3", "mistral", "gpt_oss"]), ANSWERS, ANSWERS)
def test_arguments_are_supervised_and_results_never(family, argument, result):
    tokenizer = family_tokenizer(family)
    messages = tool_turns({"city": argument})
    messages[2]["content"] = result
    rendered = render_conversation(tokenizer, messages, {})
    call, answer = supervised(tokenizer, rendered)
    assert "weather" in call
    assert answer == "It rains." + LAST_END[family]
    without = render_conversation(
        tokenizer, [*messages[:2], {**messages[2], "content": "x"}, messages[3]], {}
    )
    assert supervised(tokenizer, without) == [call, answer]
