"""One row of a file, whatever its format, as one internal conversation.

messages      {"messages": [{"role", "content", "tool_calls"?, "reasoning_content"?}], "tools"?}
sharegpt      {"conversations": [{"from": "human" | "gpt" | ..., "value"}], "system"?, "tools"?}
prompt        {"prompt": text or messages}
pretokenised  {"input_ids": [...], "loss_mask": [...]}

All may have "id" and "finish_reason". What cannot be read is refused with the reason to count.
Rows are untrusted: nothing but `RowRejectedError` leaves this module.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import RowRejectedError
from services.target_server.data_config import Format
from services.target_server.inputs.readers import RawRow
from services.target_server.inputs.turns import Message, from_json, read_turns

_BOM = b"\xef\xbb\xbf"
_KEYS: dict[str, Format] = {
    "input_ids": "pretokenised",
    "messages": "messages",
    "conversations": "sharegpt",
    "prompt": "prompt",
}
_KEY_OF = {kind: key for key, kind in _KEYS.items()}


@dataclass(frozen=True, eq=False)
class Pretokenised:
    """Ids that came with their loss mask; both [length]."""

    token_ids: np.ndarray  # int32
    loss_mask: np.ndarray  # uint8


@dataclass(frozen=True, eq=False)
class Conversation:
    """Messages in the form that chat templates take, or ids."""

    content: "list[Message] | Pretokenised"
    tools: Any
    """Schemas of the functions that the assistant may call, which some files hold as JSON in a string."""
    was_cut: bool
    """Whether the last answer ended at a length limit."""


def parse(raw: RawRow) -> dict[str, Any]:
    """Return the object that a row holds."""
    if isinstance(raw, RowRejectedError):
        raise raw
    if isinstance(raw, dict):
        return raw
    if raw.isspace() or not raw:
        raise RowRejectedError("empty_line", "the line is blank")
    try:
        row = json.loads(raw.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowRejectedError("bad_utf8", str(error)) from error
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("not_json", str(error)) from error
    if not isinstance(row, dict):
        raise RowRejectedError("not_json", f"got {type(row).__name__}, expected an object")
    return row


def read_conversation(row: dict[str, Any], kind: Format = "auto") -> Conversation:
    """Return the conversation in a row, or raise `RowRejectedError`."""
    kind = _format_of(row) if kind == "auto" else kind
    value = row.get(_KEY_OF[kind])
    if value is None:
        raise RowRejectedError("no_messages", f"a {kind} row needs {_KEY_OF[kind]!r}")
    content: list[Message] | Pretokenised
    if kind == "pretokenised":
        content = _pretokenised(value, row.get("loss_mask"))
    elif kind == "prompt" and isinstance(value, str):
        content = read_turns([{"role": "user", "content": value}])
    else:
        content = read_turns(value)
        system = row.get("system")
        if kind == "sharegpt" and isinstance(system, str) and system:
            content = [*read_turns([{"role": "system", "content": system}]), *content]
    return Conversation(
        content, from_json("bad_tools", row.get("tools")), row.get("finish_reason") == "length"
    )


def name_of(row: dict[str, Any], otherwise: str) -> str:
    """Return a row's own id where it has one."""
    key = row.get("id")
    if not isinstance(key, str | int):
        return otherwise
    return str(key)[:200].encode(errors="replace").decode()


def _format_of(row: dict[str, Any]) -> Format:
    for key, kind in _KEYS.items():
        if row.get(key) is not None:
            return kind
    keys = ", ".join(sorted(row)[:8])
    raise RowRejectedError("no_messages", f"got keys {keys}; expected one of {', '.join(_KEYS)}")


def _pretokenised(ids: Any, mask: Any) -> Pretokenised:
    token_ids = _integers("bad_ids", "input_ids", ids)
    loss_mask = _integers("bad_mask", "loss_mask", mask)
    if len(token_ids) != len(loss_mask):
        raise RowRejectedError(
            "bad_mask", f"got {len(loss_mask)} entries, expected one for each of {len(token_ids)}"
        )
    if loss_mask.min() < 0 or loss_mask.max() > 1:
        raise RowRejectedError("bad_mask", "expected 0 and 1 alone")
    if token_ids.min() < 0 or token_ids.max() >= 1 << 31:
        raise RowRejectedError(
            "id_outside_vocabulary", f"got ids from {token_ids.min()} to {token_ids.max()}"
        )
    return Pretokenised(token_ids.astype(np.int32), loss_mask.astype(np.uint8))


def _integers(reason: str, name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, TypeError) as error:  # ragged, or beyond 64 bits
        raise RowRejectedError(reason, f"{name}: {error}") from error
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iub":
        raise RowRejectedError(reason, f"{name}: expected a list of integers, not an empty one")
    return array
