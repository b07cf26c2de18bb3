"""Prompts to be answered: conversations whose assistant turns are all written anew.

Turns are written in order, each behind the answers before it. A conversation ends early where an
answer does not end by itself, for what follows would answer something else, and with the first
turn that called tools: the results behind it belong to that other call.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xxhash

from common.errors import ConfigError, RowRejectedError

Message = dict[str, Any]
_REPLACED_KEYS = ("id", "messages", "prompt", "tools", "finish_reason")


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


class Sink(Protocol):
    """Where answered dialogues go."""

    def add(self, dialogue: Dialogue) -> None: ...
    def skip(self, error: RowRejectedError, name: str) -> None: ...
    def fail(self, name: str) -> None: ...


def read_dialogues(path: Path) -> Iterator[Dialogue | RowRejectedError]:
    """Yield each usable line of a JSONL file, or what is wrong with it and where.

    A line without an id gets a hash of its messages; of two lines with one id the first counts.
    """
    if not path.is_file():
        raise ConfigError(f"regeneration.prompts={str(path)!r}: no such file; give a JSONL file")
    seen: set[str] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                dialogue = parse_dialogue(line)
            except RowRejectedError as error:
                yield RowRejectedError(error.reason, f"line {number}")
                continue
            if dialogue.id in seen:
                yield RowRejectedError("same_id", f"line {number}")
                continue
            seen.add(dialogue.id)
            yield dialogue


def parse_dialogue(line: bytes) -> Dialogue:
    """Return a line's conversation up to the first turn to be written, or `RowRejectedError`."""
    try:
        row = json.loads(line)
        messages = row["messages"] if "messages" in row else _as_messages(row["prompt"])
        segments = _segments(messages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RowRejectedError("not_json", "no JSON object with messages or a prompt") from error
    if not segments:
        raise RowRejectedError("no_user_turn", "nothing in it asks for an answer")
    key = row.get("id")
    if key is None:
        key = xxhash.xxh3_64_hexdigest(json.dumps(segments).encode())
    extra = {name: value for name, value in row.items() if name not in _REPLACED_KEYS}
    return Dialogue(str(key), segments[0], segments[1:], row.get("tools") or [], extra)


def _as_messages(prompt: Any) -> list[Message]:
    """Return a prompt that is a text, or a list of messages, as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


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
