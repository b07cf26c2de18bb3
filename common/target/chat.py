"""Turns conversations into token ids and loss masks by the target's own chat template.

A conversation is rendered whole, once; its ids are those of that render. The loss mask is 1 on
what the assistant wrote (its text, its reasoning or tool calls where the render shows them, and
the token that ends its turn) and 0 on what the template put in: headers, an empty think block,
the newline behind the end of a turn. Texts become ids here and nowhere else, without special
tokens added a second time.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2
import xxhash
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import RowRejectedError
from common.target.written_spans import Message, Span, written_spans

ROLES = ("system", "developer", "user", "assistant", "tool")
_LOSS_MASK_RULE = "assistant-text-and-end-of-turn/1"
# What a template may raise on a row that it does not take.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError,
)  # fmt: skip


@dataclass(frozen=True)
class RenderedConversation:
    """Ids of a whole conversation and, for each, whether the assistant wrote it."""

    token_ids: list[int]
    loss_mask: list[int]


def render_prompt(
    tokenizer: Tokenizer, messages: list[Message], kwargs: dict[str, Any]
) -> list[int]:
    """Return the ids up to the point where the assistant begins to write."""
    check_messages(messages)
    text = _render(tokenizer, kwargs, messages, add_generation_prompt=True)
    return _encode(tokenizer, text)[0]


def render_conversation(
    tokenizer: Tokenizer,
    messages: list[Message],
    kwargs: dict[str, Any],
    *,
    last_turn_was_cut: bool = False,
) -> RenderedConversation:
    """Return ids and loss mask, or raise `RowRejectedError` with the reason to count.

    Where the last answer was cut at a length limit, the assistant did not write its end of turn.
    """
    check_messages(messages)
    _check_assistant_turns(messages)
    text = _render(tokenizer, kwargs, messages)
    spans = written_spans(partial(_render, tokenizer, kwargs), messages, text)
    token_ids, offsets = _encode(tokenizer, text)
    mask = _mask_of(spans, offsets)
    special = tokenizer.added_tokens_decoder
    for _, stop in spans[:-1] if last_turn_was_cut else spans:
        end = _end_of_turn(text, offsets, stop)
        if end is not None and token_ids[end] in special:
            mask[end] = 1
    if not any(mask):
        raise RowRejectedError("no_loss_tokens", "no token lies wholly in an assistant's text")
    return RenderedConversation(token_ids, mask)


def template_fingerprint(tokenizer: Tokenizer, kwargs: dict[str, Any]) -> str:
    """Return 16 hex digits for tokenizer, chat template, its arguments and the mask rule."""
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("padding", "truncation"):  # left by the last call, no part of the identity
        vocabulary.pop(state, None)
    parts = [_LOSS_MASK_RULE, tokenizer.chat_template, kwargs, vocabulary]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())


def check_messages(messages: Any) -> None:
    """Refuse what is not a list of messages with known roles and text."""
    if not isinstance(messages, list) or not messages:
        raise RowRejectedError("no_messages", "expected a list of at least one message")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise RowRejectedError("bad_role", f"got {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            kind = type(message.get("content")).__name__
            raise RowRejectedError("bad_content", f"a {role} message has {kind}, expected text")


def _check_assistant_turns(messages: list[Message]) -> None:
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        raise RowRejectedError("no_assistant_turn", "nothing in it was written by the assistant")
    if any(not turn.get("tool_calls") and not turn["content"].strip() for turn in turns):
        raise RowRejectedError("empty_assistant_turn", "an assistant message has no text")


def _render(
    tokenizer: Tokenizer,
    kwargs: dict[str, Any],
    messages: list[Message],
    add_generation_prompt: bool = False,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except _TEMPLATE_ERRORS as error:
        raise RowRejectedError("template_rejected", str(error)) from error
    return str(text)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[Span]]:
    """Return ids and character offsets; the render has all special tokens already."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    token_ids = encoding["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and token_ids[:2] == [bos, bos]:
        raise RowRejectedError("double_bos", f"the render begins with token {bos} twice")
    return token_ids, encoding["offset_mapping"]


def _mask_of(spans: list[Span], offsets: list[Span]) -> list[int]:
    """Mark tokens that lie wholly in a span; one that reaches over its border is the template's."""
    mask = [0] * len(offsets)
    begins = [begin for begin, _ in offsets]
    for start, stop in spans:
        for token in range(bisect_left(begins, start), bisect_left(begins, stop)):
            mask[token] = int(offsets[token][1] <= stop)
    return mask


def _end_of_turn(text: str, offsets: list[Span], stop: int) -> int | None:
    """Return the token behind an answer, past the blank that some templates put before it."""
    for token in range(bisect_left(offsets, (stop, stop)), len(offsets)):
        begin, end = offsets[token]
        if text[begin:end].strip(" "):
            return token
    return None
