"""Turns conversations into token ids and loss masks by the target's own chat template.

A conversation is rendered whole; its ids are those of that render. The loss mask is 1 on what
the assistant wrote (its text, its reasoning or tool calls where the render shows them, and the
token that ends its turn) and 0 on what the template put in: headers, an empty think block, the
newline behind the end of a turn. Texts become ids here and nowhere else, without special tokens
added a second time.

Templates of reasoning models drop the reasoning of earlier turns, so that a whole render is not
what the target had before it when it wrote those. With `MaskOptions.one_row_a_turn` each turn
becomes a sample of its own: the prompt as the target was given it, and that turn.
"""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import xxhash
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import RowRejectedError
from common.target.messages import (
    REASONING_KEYS,
    Message,
    check_assistant_turns,
    checked_messages,
    checked_tools,
)
from common.target.template import DEFAULT_TODAY, ChatTemplate, chat_template
from common.target.written_spans import Turn, written_turns

_LOSS_MASK_RULE = "assistant-writing-and-end-of-turn/2"


@dataclass(frozen=True)
class MaskOptions:
    """Which of the assistant's turns are supervised."""

    train_only_last_turn: bool = False
    """Supervise the last turn of a conversation alone."""
    one_row_a_turn: bool = False
    """Make a sample of each turn, in which it alone is supervised."""


@dataclass(frozen=True)
class RenderedConversation:
    """Ids of a conversation and, for each, whether the assistant wrote it."""

    token_ids: list[int]
    loss_mask: list[int]
    notes: tuple[str, ...] = ()
    """What is odd about a sample that is used: control_tokens, repeated_role, and what the template
    leaves out: system_dropped, tools_dropped, reasoning_dropped (of the last turn)."""

    @property
    def num_supervised(self) -> int:
        """Tokens with mask 1."""
        return sum(self.loss_mask)


def render_prompt(
    tokenizer: Tokenizer,
    messages: list[Message],
    kwargs: dict[str, Any],
    *,
    tools: list[Any] | None = None,
) -> list[int]:
    """Return the ids up to the point where the assistant begins to write."""
    template = chat_template(tokenizer, kwargs)
    messages = checked_messages(messages)
    text = template.render(messages, checked_tools(tools), add_generation_prompt=True)
    return _encode(template, text).ids


def render_conversation(
    tokenizer: Tokenizer,
    messages: list[Message],
    kwargs: dict[str, Any],
    *,
    tools: list[Any] | None = None,
    options: MaskOptions = MaskOptions(),
    last_turn_was_cut: bool = False,
) -> RenderedConversation:
    """Return ids and loss mask of the whole, or raise `RowRejectedError` with the reason to count.

    Where the last answer was cut at a length limit, the assistant did not write its end of turn.
    """
    template = chat_template(tokenizer, kwargs)
    messages, tools = checked_messages(messages), checked_tools(tools)
    check_assistant_turns(messages)
    text = template.render(messages, tools)
    turns = written_turns(template, messages, tools, text)
    whole = turns[:-1] if last_turn_was_cut else turns
    if options.train_only_last_turn:
        turns, whole = turns[-1:], whole[len(turns) - 1 :]
    return _masked(template, text, turns, whole, _notes(template, messages, tools, text))


def render_samples(
    tokenizer: Tokenizer,
    messages: list[Message],
    kwargs: dict[str, Any],
    *,
    tools: list[Any] | None = None,
    options: MaskOptions = MaskOptions(),
    last_turn_was_cut: bool = False,
) -> list[RenderedConversation]:
    """Return the samples of a conversation by `options`: one, or one a turn; raise as above."""
    if not options.one_row_a_turn:
        return [
            render_conversation(
                tokenizer, messages, kwargs,
                tools=tools, options=options, last_turn_was_cut=last_turn_was_cut,
            )
        ]  # fmt: skip
    template = chat_template(tokenizer, kwargs)
    messages, tools = checked_messages(messages), checked_tools(tools)
    check_assistant_turns(messages)
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        _render_turn(
            template, messages[: i + 1], tools, was_cut=last_turn_was_cut and i == indices[-1]
        )
        for i in indices
    ]


def template_fingerprint(
    tokenizer: Tokenizer,
    kwargs: dict[str, Any],
    *,
    options: MaskOptions = MaskOptions(),
    max_tokens: int = 0,
) -> str:
    """Return "<tokenizer, template and arguments>-<mask rule, its options, longest sample>", in hex."""
    rule = [_LOSS_MASK_RULE, asdict(options), max_tokens]
    return f"{_template_part(tokenizer, kwargs)}-{_hash(rule)}"


def has_template(fingerprint: str, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> bool:
    """Say whether a template fingerprint is of this tokenizer, template and arguments."""
    return fingerprint.partition("-")[0] == _template_part(tokenizer, kwargs)


def _template_part(tokenizer: Tokenizer, kwargs: dict[str, Any]) -> str:
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("padding", "truncation"):  # left by the last call, no part of the identity
        vocabulary.pop(state, None)
    specials = tokenizer.special_tokens_map
    return _hash(
        [tokenizer.chat_template, {"today": DEFAULT_TODAY, **kwargs}, specials, vocabulary]
    )


def _hash(parts: list[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def _render_turn(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, *, was_cut: bool
) -> RenderedConversation:
    """Render the last message behind the prompt that the target had when it wrote it."""
    prompt = template.render(messages[:-1], tools, add_generation_prompt=True)
    text = template.render(messages, tools)
    turn = written_turns(template, messages, tools, text)[-1]
    notes = _notes(template, messages[:-1], tools, prompt)
    if not text.startswith(prompt):
        # The template moves or drops something of the prompt once it is answered.
        text = prompt + text[turn.prompt_end :]
        shift = len(prompt) - turn.prompt_end
        turn = Turn(len(prompt), turn.start + shift, turn.stop + shift)
    return _masked(template, text, [turn], [] if was_cut else [turn], notes)


def _masked(
    template: ChatTemplate, text: str, turns: list[Turn], whole: list[Turn], notes: tuple[str, ...]
) -> RenderedConversation:
    """Encode; supervise what was written in `turns`, and the ends of turns of those in `whole`."""
    encoding = _encode(template, text)
    token_ids = encoding.ids
    mask = [0] * len(token_ids)
    for turn in turns:
        tokens = _tokens_between(encoding, turn.start, turn.stop, text)
        mask[tokens.start : tokens.stop] = [1] * len(tokens)
    for turn in whole:
        end = _end_of_turn(encoding, turn.stop, text)
        if end is not None and token_ids[end] in template.added_token_ids:
            mask[end] = 1
    if not any(mask):
        raise RowRejectedError("no_loss_tokens", "no token lies wholly in an assistant's text")
    return RenderedConversation(token_ids, mask, notes)


def _encode(template: ChatTemplate, text: str) -> Encoding:
    """Return the tokens of a render, which has all special tokens already."""
    encoding = template.encoder.encode(text, add_special_tokens=False)
    bos = template.bos_token_id
    if bos is not None and encoding.ids[:2] == [bos, bos]:
        raise RowRejectedError("double_bos", f"the render begins with token {bos} twice")
    return encoding


def _tokens_between(encoding: Encoding, start: int, stop: int, text: str) -> range:
    """Return the tokens wholly in a span; one that reaches over its border is the template's."""
    first = _token_at(encoding, start, text)
    end = _token_at(encoding, stop, text)
    if first < len(encoding) and _begin_of(encoding, first) < start:
        first += 1
    return range(first, max(first, end))


def _token_at(encoding: Encoding, position: int, text: str) -> int:
    """Return the first token that holds the character, or one behind it where none does."""
    while position < len(text):
        token = encoding.char_to_token(position)
        if token is not None:
            return int(token)
        position += 1
    return len(encoding)


def _begin_of(encoding: Encoding, token: int) -> int:
    characters = encoding.token_to_chars(token)
    return 0 if characters is None else int(characters[0])


def _end_of_turn(encoding: Encoding, stop: int, text: str) -> int | None:
    """Return the token behind an answer, past the blank that some templates put before it."""
    while text.startswith(" ", stop):
        stop += 1
    token = encoding.char_to_token(stop) if stop < len(text) else None
    if token is None or _begin_of(encoding, token) < stop:
        return None
    return int(token)


def _notes(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, text: str
) -> tuple[str, ...]:
    """Return what a reader should know of a sample that its template does not refuse."""
    roles = [message["role"] for message in messages if message["role"] != "tool"]
    systems = [m["content"].strip() for m in messages if m["role"] in ("system", "developer")]
    reasoning = messages[-1].get(REASONING_KEYS[0], "") if messages else ""
    texts = [m[key] for m in messages for key in ("content", REASONING_KEYS[0]) if m.get(key)]
    notes = {
        "control_tokens": any(token in text for text in texts for token in template.control_tokens),
        "system_dropped": not all(content in text for content in systems),
        "tools_dropped": not all(_name_of(tool) in text for tool in tools or ()),
        "reasoning_dropped": reasoning.strip() not in text,
        "repeated_role": any(a == b == "user" for a, b in pairwise(roles)),
    }
    return tuple(name for name, holds in notes.items() if holds)


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, dict) else ""
