"""Reads a server's answer, which is untrusted, as one assistant turn.

An answer that is written counts as answered and is never asked for again, so one that a template
could not render is refused here. What only counts, `usage`, is ignored where it makes no sense.
"""

from typing import Any

from common.errors import RowRejectedError
from common.target.messages import checked_messages
from services.target_server.dialogues import Reply
from services.target_server.inputs.turns import Message
from services.target_server.plain_json import check_json

_REASONING_KEYS = ("reasoning_content", "reasoning")
# The server's word that there shall be no answer.
_WITHHELD = "content_filter"


def read_reply(payload: dict[str, Any]) -> Reply:
    """Return the first choice of a chat completion.

    Raises:
        RowRejectedError: `empty_answer`, or `bad_answer` for wrong types and for what is no text.
    """
    choice = payload["choices"][0]
    said = choice["message"]
    finish_reason = choice.get("finish_reason") or "unknown"
    content = said.get("content")
    message: Message = {"role": "assistant", "content": "" if content is None else content}
    reasoning = next((said[key] for key in _REASONING_KEYS if said.get(key)), None)
    if reasoning:
        message["reasoning_content"] = reasoning
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    _check(message, finish_reason)
    return Reply(message, finish_reason, _num_tokens(payload))


def _check(message: Message, finish_reason: Any) -> None:
    if not isinstance(finish_reason, str):
        raise RowRejectedError("bad_answer", f"finish_reason is {finish_reason!r:.80}")
    try:
        check_json("bad_answer", [message, finish_reason])
        checked_messages([message])
    except RowRejectedError as error:
        raise RowRejectedError("bad_answer", str(error)) from error
    if len(message) == 2 and not message["content"].strip() and finish_reason != _WITHHELD:
        raise RowRejectedError(
            "empty_answer", f"no text, reasoning or tool call, finish_reason={finish_reason!r:.80}"
        )


def _num_tokens(payload: dict[str, Any]) -> int:
    usage = payload.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int and count >= 0 else 0
