"""Finds where in a rendered conversation the assistant's own writing lies.

Texts are found by one more render, with marks in the place of the assistant's texts, reasoning
and tool names: the pieces between the marks are the template's, and pieces and texts must make
up the whole render exactly. A turn begins at its first mark and what the assistant writes before
it (`ChatTemplate.opening`); it ends behind its text, or at the token that ends tool calls.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from common.errors import RowRejectedError
from common.target.messages import REASONING_KEYS, Message, with_reasoning
from common.target.template import ChatTemplate

TEXT, REASONING, NAME, RESULT = "T", "R", "N", "Q"
_MARK = re.compile(rf"Ringdraft([{TEXT}{REASONING}{NAME}{RESULT}])([0-9]+)Mark")
_THINK_BLOCK = re.compile(r"(\s*(?:<think>)?\s*)(.*?)(\s*</think>(?:.*</think>)?\s*)", re.DOTALL)
_TOOL_RESPONSE = ("<tool_response>", "</tool_response>")

Mark = tuple[str, int]


@dataclass(frozen=True)
class Turn:
    """Characters of the render that one message of the assistant takes."""

    prompt_end: int
    """Where the generation prompt ends."""
    start: int
    stop: int
    """From `start` to here the assistant wrote; the token that ends the turn lies behind."""


@dataclass(frozen=True)
class _Segment:
    """A marked text in the render, and where the segment before it stops."""

    kind: str
    index: int
    start: int
    stop: int
    after: int


def written_turns(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, text: str
) -> list[Turn]:
    """Return the assistant's turns in `text`, the whole render, or raise `RowRejectedError`."""
    marked, values = _marked(messages, takes_think_blocks=template.takes_think_blocks)
    segments = _aligned(template.render(marked, tools), values, text)
    own: dict[int, dict[str, _Segment]] = {}
    for segment in segments:
        kinds = own.setdefault(segment.index, {})
        if segment.kind in (TEXT, REASONING) and segment.kind in kinds:
            raise _altered(segment.index)
        kinds.setdefault(segment.kind, segment)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            parts = own.get(index, {})
            _check_parts(index, message, parts)
            start = _start(template, message, parts, text)
            stop = (
                _end_of_calls(template, index, parts[NAME], segments, text)
                if NAME in parts
                else parts[TEXT].stop
            )
            after = min(part.after for part in parts.values())
            turns.append(Turn(_prompt_end(template, text[after:start], start), start, stop))
    return turns


def _marked(
    messages: list[Message], *, takes_think_blocks: bool
) -> tuple[list[Message], dict[Mark, str]]:
    """Return messages with marks for texts, and the texts."""
    values: dict[Mark, str] = {}
    marked = list(messages)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            marked[index] = _marked_turn(index, message, values, takes_think_blocks)
        elif index and messages[index - 1].get("tool_calls"):
            # Bounds the search for the end of the calls.
            content = message["content"]
            before, behind = _TOOL_RESPONSE if content.startswith(_TOOL_RESPONSE[0]) else ("", "")
            values[RESULT, index] = content.removeprefix(before).removesuffix(behind)
            marked[index] = {**message, "content": before + _mark(RESULT, index) + behind}
    return marked, values


def _marked_turn(
    index: int, message: Message, values: dict[Mark, str], takes_think_blocks: bool
) -> Message:
    content = message["content"]
    changes: Message = {}
    before = ""
    if REASONING_KEYS[0] in message:
        values[REASONING, index] = message[REASONING_KEYS[0]]
        changes = with_reasoning(_mark(REASONING, index))
    elif takes_think_blocks and (block := _THINK_BLOCK.match(content)):
        before = block[0]
        content = content[block.end() :]
        if block[2]:
            values[REASONING, index] = block[2]
            before = block[1] + _mark(REASONING, index) + block[3]
    if content.strip() or not message.get("tool_calls"):
        values[TEXT, index] = content
        changes["content"] = before + _mark(TEXT, index)
    if message.get("tool_calls"):
        call, *others = message["tool_calls"]
        values[NAME, index] = call["function"]["name"]
        function = {**call["function"], "name": _mark(NAME, index)}
        changes["tool_calls"] = [{**call, "function": function}, *others]
    return {**message, **changes}


def _mark(kind: str, index: int) -> str:
    return f"Ringdraft{kind}{index}Mark"


def _aligned(marked: str, values: dict[Mark, str], text: str) -> list[_Segment]:
    """Return where the texts lie that the marks stand for; all else must be equal."""
    first, *rest = _MARK.split(marked)
    if not text.startswith(first):
        raise _altered(int(rest[1]) if rest else 0)
    position = len(first)
    after = 0
    segments = []
    for kind, number, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        index = int(number)
        value = values.get((kind, index))
        stop = None if value is None else _end_of(value, piece, text, position)
        if stop is None:
            raise _altered(index)
        segments.append(_Segment(kind, index, position, stop, after))
        after = stop
        position = stop + len(piece)
    if position != len(text):
        raise _altered(segments[-1].index if segments else 0)
    return segments


def _end_of(value: str, piece: str, text: str, position: int) -> int | None:
    """Return where the value ends as the template trimmed or escaped it, `piece` behind it."""
    if text.startswith(value, position) and text.startswith(piece, position + len(value)):
        return position + len(value)
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    forms = (value.rstrip(), value.lstrip(), value.strip(), value.rstrip("\n"),
             value.lstrip("\n"), value.strip("\n"), escaped)  # fmt: skip
    return next((position + len(f) for f in forms if text.startswith(f + piece, position)), None)


def _check_parts(index: int, message: Message, parts: dict[str, _Segment]) -> None:
    if message.get("tool_calls"):
        if NAME not in parts:
            raise RowRejectedError(
                "template_drops_tool_calls", f"the calls of message {index} are not in its render"
            )
    elif TEXT not in parts:
        raise _altered(index)


def _start(template: ChatTemplate, message: Message, parts: dict[str, _Segment], text: str) -> int:
    """Return where the assistant begins to write a turn."""
    first = min(parts.values(), key=lambda part: part.start)
    before = text[first.after : first.start]
    if first.kind == REASONING:
        own = "" if REASONING_KEYS[0] in message else _opening_tag(message["content"])
        known = template.opening("think_block" if own else "reasoning") or ""
        fitting = [opening for opening in (known, own) if before.endswith(opening)]
        return first.start - max(map(len, fitting), default=0)
    if first.kind == NAME:
        opening = template.opening("call")
    else:
        opening = template.opening("answer_and_call" if NAME in parts else "answer")
    if opening is None or not before.endswith(opening):
        if first.kind == NAME:
            raise _unclear("begins")
        return first.start
    return first.start - len(opening)


def _opening_tag(content: str) -> str:
    block = _THINK_BLOCK.match(content)
    return block[1] if block else ""


def _end_of_calls(
    template: ChatTemplate, index: int, name: _Segment, segments: list[_Segment], text: str
) -> int:
    """Return where a turn's calls end: before the last such token that precedes the next text."""
    behind = (s.start for s in segments if s.start > name.start and s.index != index)
    token = template.end_of_call
    end = -1 if token is None else text.rfind(token, name.stop, next(behind, len(text)))
    if end < 0:
        raise _unclear("ends")
    return len(text[:end].rstrip(" ")) if text[end - 1] == " " else end


def _prompt_end(template: ChatTemplate, before: str, start: int) -> int:
    """Return where the generation prompt ends, which an empty think block may follow."""
    prompt = template.generation_prompt
    for header in template.headers:
        if header.startswith(prompt) and before.endswith(header):
            return start - len(header) + len(prompt)
    return start


def _altered(index: int) -> RowRejectedError:
    return RowRejectedError(
        "template_alters_text",
        f"the template does not render the text of message {index} once and as it is",
    )


def _unclear(verb: str) -> RowRejectedError:
    return RowRejectedError(
        "template_unclear", f"where a turn with tool calls {verb} cannot be told from its render"
    )
