"""Prompts to be answered: conversations whose assistant turns are all to be written anew.

Turns are written in order, each behind the answers before it. A conversation ends early where an
answer does not end by itself, for what follows would answer something else, and with the first
turn that called tools: the results behind it belong to that other call.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from common.errors import ConfigError, RowRejectedError

Message = dict[str, Any]
_TOOL_KEYS = ("tool_calls", "function_call")
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
    """What is written so far; ends with the turn that asks."""
    ahead: list[Message]
    """What the input has behind that; its assistant turns only say where one is to be written."""
    tools: list[Any]
    """Tools that the assistant may call, in OpenAI's form."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other keys of the input, such as tag."""
    finish_reason: str = ""
    num_tokens: int = 0

    @property
    def is_done(self) -> bool:
        """Whether no further turn is to be written."""
        return self.messages[-1]["role"] == "assistant" and not self.ahead

    @property
    def turn(self) -> int:
        """Ordinal of the assistant turn that is next, from 0."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def take(self, reply: Reply) -> None:
        """Add the answer to the turn that asks, and what the input says behind it."""
        self.messages.append(reply.message)
        self.finish_reason = reply.finish_reason
        self.num_tokens += reply.num_tokens
        if reply.finish_reason != "stop":
            self.ahead = []
        self._go_to_next_turn()

    def record(self) -> dict[str, Any]:
        """Return the line to be written."""
        tools = {"tools": self.tools} if self.tools else {}
        return self.extra | {
            "id": self.id, "messages": self.messages, **tools, "finish_reason": self.finish_reason
        }  # fmt: skip

    def _go_to_next_turn(self) -> None:
        """Move what does not need an answer from `ahead` to `messages`."""
        while self.ahead:
            message = self.ahead.pop(0)
            if message["role"] == "assistant":
                if any(message.get(key) for key in _TOOL_KEYS):
                    self.ahead = []
                return
            self.messages.append(message)


def read_dialogues(path: Path) -> Iterator[Dialogue | RowRejectedError]:
    """Yield each usable line of a JSONL file, and why a line is not; raise `ConfigError` for no file.

    A line without an id gets a hash of what it asks; of two lines with one id the first counts.
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
                if dialogue.id in seen:
                    raise RowRejectedError("same_id", f"{dialogue.id!r} came before")
            except RowRejectedError as error:
                _log.debug("%s line %d skipped: %s", path, number, error)
                yield RowRejectedError(error.reason, f"line {number}")
                continue
            seen.add(dialogue.id)
            yield dialogue


def parse_dialogue(line: bytes) -> Dialogue:
    """Return a line's conversation up to the first turn to be written, or `RowRejectedError`."""
    try:
        row = json.loads(line)
        messages = row["messages"] if "messages" in row else [_question(row["prompt"])]
        roles = [message["role"] for message in messages]
    except (ValueError, KeyError, TypeError) as error:
        raise RowRejectedError("not_json", "no JSON object with messages or a prompt") from error
    if "user" not in roles:
        raise RowRejectedError("no_user_turn", "nothing in it asks for an answer")
    # Greetings before the first question are the assistant's, but nobody asked for them.
    first = roles.index("user")
    last = len(roles) - roles[::-1].index("user")
    asked = [*messages[first:last], *_answers_behind(messages[last:])]
    opening = [m for m in messages[:first] if m["role"] != "assistant"]
    key = row.get("id")
    if key is None:
        key = xxhash.xxh3_64_hexdigest(json.dumps(messages[:last]).encode())
    kept = {k: v for k, v in row.items() if k not in ("id", "messages", "prompt", "finish_reason", "tools")}
    dialogue = Dialogue(str(key), opening, asked, row.get("tools") or [], kept)
    dialogue._go_to_next_turn()
    return dialogue


def _question(prompt: Any) -> Message:
    if not isinstance(prompt, str):
        raise TypeError
    return {"role": "user", "content": prompt}
