"""Brings the messages of a conversation into the one form that is given to chat templates.

Templates differ in what they read: arguments of a tool call as an object, null content as "",
reasoning under one of three names, a key that is there as a key that is set. The form here is
understood by all of them; a conversation that cannot be brought into it is rejected.
"""

import json
from typing import Any

from common.errors import RowRejectedError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


def checked_messages(messages: Any) -> list[Message]:
    """Return the messages in the form above, or raise `RowRejectedError`."""
    if not isinstance(messages, list) or not messages:
        raise RowRejectedError("no_messages", "expected a list of at least one message")
    return [_checked_message(message) for message in messages]


def check_assistant_turns(messages: list[Message]) -> None:
    """Refuse a conversation in which there is nothing to learn, or nothing to answer."""
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        raise RowRejectedError("no_assistant_turn", "nothing in it was written by the assistant")
    spoken = (message["role"] for message in messages)
    if next(role for role in spoken if role not in ("system", "developer")) == "assistant":
        raise RowRejectedError("assistant_first", "no user speaks before the assistant")
    if any(not turn.get("tool_calls") and not turn["content"].strip() for turn in turns):
        raise RowRejectedError("empty_assistant_turn", "an assistant message has no text")


def checked_tools(tools: Any) -> list[Any] | None:
    """Return the tools of a conversation for its template; None where it has none."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRejectedError("bad_tools", f"got {tools!r:.80}, expected a list of objects")
    return tools


def _checked_message(message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RowRejectedError("bad_role", f"got {role!r}, expected one of {', '.join(ROLES)}")
    # To a template a key that is null or empty is often a key that is set.
    result = {key: value for key, value in message.items() if value is not None and value != []}
    calls = result.get("tool_calls")
    content = result.setdefault("content", "" if calls or _reasoning_of(result) else None)
    if not isinstance(content, str):
        kind = type(content).__name__
        raise RowRejectedError("bad_content", f"a {role} message has {kind}, expected text")
    if role == "assistant":
        if calls:
            result["tool_calls"] = _checked_calls(calls)
        reasoning = _reasoning_of(result)
        for key in REASONING_KEYS:
            result.pop(key, None)
        if reasoning:
            result |= with_reasoning(reasoning)
    return result


def with_reasoning(reasoning: str) -> Message:
    """Return the keys under which templates look for reasoning."""
    return dict.fromkeys(REASONING_KEYS, reasoning)


def _reasoning_of(message: Message) -> str:
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    if not isinstance(reasoning, str):
        raise RowRejectedError("bad_content", f"reasoning is {type(reasoning).__name__}, not text")
    return reasoning if reasoning.strip() else ""


def _checked_calls(calls: Any) -> list[Message]:
    if not isinstance(calls, list):
        raise RowRejectedError("bad_tool_call", f"got {calls!r:.80}, expected a list of calls")
    return [_checked_call(call) for call in calls]


def _checked_call(call: Any) -> Message:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RowRejectedError("bad_tool_call", f"got {call!r:.80}, expected a function's name")
    function = {"name": name, "arguments": _as_object(function.get("arguments"))}
    outer = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    return {"type": "function", **outer, "function": function}


def _as_object(arguments: Any) -> Any:
    """Return arguments as an object; OpenAI's form is an object's JSON."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # as the assistant wrote it
    return parsed if isinstance(parsed, dict) else arguments
