"""Prompts to be answered: conversations whose assistant turns are all written anew.

Turns are written in order, each behind the answers before it. A conversation ends early where an
answer does not end by itself, for what follows would answer something else, and with the first
turn that called tools: the results behind it belong to that other call.

Messages and tools that JSON in UTF-8 cannot hold (NaN, a date, half a surrogate pair) make a row
unusable, for no server could be sent them. Other columns go into the output as they are, and are
left out of it where JSON has no form for them.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xxhash

from common.errors import ConfigError, RowRejectedError
from common.target.messages import checked_messages, checked_tools
from services.target_server.inputs.formats import Pretokenised, name_of, parse, read_conversation
from services.target_server.inputs.readers import CompressedLines, RawRow, Reader, open_reader
from services.target_server.inputs.turns import Message
from services.target_server.plain_json import check_json, is_json

_REPLACED_KEYS = ("id", "messages", "conversations", "prompt", "system", "tools", "finish_reason")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """One assistant turn as it was written."""

    message: Message
    """role, content, and reasoning_content or tool_calls where there are any."""
    finish_reason: str
    num_tokens: int


@dataclass
class Dialogue:
    """A conversation under way."""

    id: str
    messages: list[Message]
    """What is written so far; the last one asks for an answer, or is the last answer."""
    ahead: list[list[Message]]
    """What the input says behind each further answer."""
    tools: list[Any]
    """Tools that the assistant may call, in OpenAI's form."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other keys of the input, such as tag."""
    finish_reason: str = ""
    num_tokens: int = 0
    turn: int = 0
    """Answers written so far."""

    @property
    def is_done(self) -> bool:
        """Whether no further turn is to be written."""
        return bool(self.finish_reason) and self.messages[-1]["role"] == "assistant"

    def take(self, reply: Reply) -> None:
        """Add an answer, and what the input says behind it."""
        self.messages.append(reply.message)
        self.finish_reason = reply.finish_reason
        self.num_tokens += reply.num_tokens
        self.turn += 1
        if reply.finish_reason == "stop" and self.ahead:
            self.messages += self.ahead.pop(0)

    def record(self) -> dict[str, Any]:
        """Return the line to be written."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"id": self.id, "messages": self.messages, **tools, **self.extra,
                "finish_reason": self.finish_reason}  # fmt: skip


@dataclass(frozen=True)
class UnusableRow:
    """A row that holds no prompt."""

    name: str
    """Its line, and its id where it has one."""
    error: RowRejectedError


class Sink(Protocol):
    """Where answered dialogues go."""

    def add(self, dialogue: Dialogue) -> None: ...
    def skip(self, error: RowRejectedError, name: str) -> None: ...
    def fail(self, name: str) -> None: ...


def open_prompts(path: Path) -> Reader:
    """Open a file or folder of prompts, or raise `ConfigError`."""
    if not path.exists():
        raise ConfigError(f"regeneration.prompts={str(path)!r}: no such file")
    return open_reader(path, None, 0)


def read_dialogues(reader: Reader) -> Iterator[Dialogue | UnusableRow]:
    """Yield each usable row, or what is wrong with it and where.

    A row without an id gets a hash of its messages; of two rows with one id the first counts.
    """
    seen: set[str] = set()
    dropped: set[str] = set()
    for number, raw in _rows(reader):
        name = f"line {number + 1}"
        try:
            row = parse(raw)
            if key := name_of(row, ""):
                name = f"{key} ({name})"
            dialogue = _dialogue(row, dropped)
            if dialogue.id in seen:
                raise RowRejectedError("same_id", dialogue.id)
        except RowRejectedError as error:
            if error.reason != "empty_line":
                yield UnusableRow(name, error)
            continue
        seen.add(dialogue.id)
        yield dialogue


def count_rows(reader: Reader) -> int:
    """Return how many rows a reader has, usable or not; of what is compressed, a guess."""
    return reader.expected_rows if isinstance(reader, CompressedLines) else len(reader)


def _rows(reader: Reader) -> Iterator[tuple[int, RawRow]]:
    if isinstance(reader, CompressedLines):
        yield from reader.stream()
    else:
        yield from ((number, reader.read(number)) for number in range(len(reader)))


def _dialogue(row: dict[str, Any], dropped: set[str]) -> Dialogue:
    """Return a row's conversation up to the first turn to be written, or `RowRejectedError`.

    Columns that are left out are added to `dropped`, and logged the first time.
    """
    conversation = read_conversation(row)
    if isinstance(conversation.content, Pretokenised):
        raise RowRejectedError("no_messages", "got token ids, expected messages or a prompt")
    segments = _segments(checked_messages(conversation.content))
    if not segments:
        raise RowRejectedError("no_user_turn", "nothing in it asks for an answer")
    tools = checked_tools(conversation.tools) or []
    check_json("bad_content", segments)
    check_json("bad_tools", tools)
    key = name_of(row, "") or xxhash.xxh3_64_hexdigest(json.dumps(segments).encode())
    others = {name: value for name, value in row.items() if name not in _REPLACED_KEYS}
    extra = {name: value for name, value in others.items() if is_json([name, value])}
    for name in others.keys() - extra.keys() - dropped:
        dropped.add(name)
        _log.warning("column %r has values that JSON cannot hold; they are left out", name)
    return Dialogue(key, segments[0], segments[1:], tools, extra)


def _segments(messages: list[Message]) -> list[list[Message]]:
    """Return the messages before each turn that is to be written, assistant turns left out.

    An assistant turn before the first question is no answer, and one that follows another belongs
    to the same answer.
    """
    segments: list[list[Message]] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            pending.append(message)
        elif _asks(pending):
            segments.append(pending)
            pending = []
            if message.get("tool_calls"):
                return segments
    return [*segments, pending] if _asks(pending) else segments


def _asks(messages: list[Message]) -> bool:
    return any(message["role"] == "user" for message in messages)
