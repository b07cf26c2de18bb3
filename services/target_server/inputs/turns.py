"""The turns of a conversation, as OpenAI or ShareGPT files have them, with one set of keys.

* ShareGPT's "from" and "value" become role and content; its names become the roles.
* Content in text parts is their concatenation.
* OpenAI's older "function_call" and ShareGPT's turn of that name become "tool_calls".

What a message must have is checked where it is rendered (`common/target/messages.py`).
"""

import json
from typing import Any

from common.errors import RowRejectedError

Message = dict[str, Any]
_ROLE_OF = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}


def read_turns(turns: Any) -> list[Message]:
    """Return the messages, or raise `RowRejectedError`."""
    if isinstance(turns, dict):  # older Hugging Face datasets have a column a key
        turns = _by_turn(turns)
    if not isinstance(turns, list) or not turns:
        raise RowRejectedError("no_messages", "expected a list of at least one message")
    return [_message(turn) for turn in turns]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowRejectedError("bad_role", f"got a {type(turn).__name__}, expected a message")
    message = dict(turn)
    author = message.pop("from", None)
    author = message.get("role") or author
    value = message.pop("value", None)
    content = message.get("content", value)
    call = message.pop("function_call", None)
    if author == "function_call":
        call, content = content, None
    if call and not message.get("tool_calls"):
        calls = from_json("bad_tool_call", call)
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    message["role"] = _ROLE_OF.get(author, author) if isinstance(author, str) else author
    message["content"] = _joined(content) if isinstance(content, list) else content
    return message


def _joined(parts: list[Any]) -> str:
    """Return the text of a content in parts."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowRejectedError("bad_content", "got a part that is no text, expected text alone")
    return "".join(map(str, texts))


def from_json(reason: str, value: Any) -> Any:
    """Return what JSON in a string holds, and anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RowRejectedError(reason, f"no JSON: {error}") from error


def _by_turn(columns: dict[str, Any]) -> list[dict[str, Any]]:
    lists = {key: value for key, value in columns.items() if isinstance(value, list)}
    lengths = {len(value) for value in lists.values()}
    if len(lengths) != 1:
        raise RowRejectedError("no_messages", "expected a list of messages")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
