"""Reads held-out prompts: JSON lines of {"id"?, "messages"}, rendered up to the target's answer."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import ConfigError, RowRejectedError
from common.target.chat import render_prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target begins to write."""

    id: str
    token_ids: list[int]


def read_prompts(
    path: Path, tokenizer: Tokenizer, kwargs: dict[str, Any], *, max_prompts: int, max_tokens: int
) -> list[Prompt]:
    """Return the first usable prompts; warn of each that is not, and raise where none is.

    Args:
        kwargs: arguments of the chat template.
        max_tokens: longest prompt that leaves room for an answer.
    """
    prompts: list[Prompt] = []
    for key, messages in _conversations(path):
        if len(prompts) == max_prompts:
            break
        try:
            token_ids = render_prompt(tokenizer, _up_to_last_question(messages), kwargs)
        except RowRejectedError as error:
            _log.warning("prompt %r skipped: %s", key, error)
            continue
        if len(token_ids) > max_tokens:
            _log.warning(
                "prompt %r skipped: got %d tokens, expected at most %d so that its answer fits",
                key, len(token_ids), max_tokens,
            )  # fmt: skip
            continue
        prompts.append(Prompt(key, token_ids))
    if not prompts:
        raise ConfigError(
            f"evaluation.prompts={str(path)!r}: got no usable prompt, expected lines of "
            f'{{"messages": [...]}}; see the warnings above'
        )
    return prompts


def _conversations(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield id and messages of each line that has them; the line's number serves as the id."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                yield str(record.get("id", number)), record["messages"]
            except (ValueError, KeyError, AttributeError):
                _log.warning("%s line %d skipped: no JSON object with messages", path, number)


def _up_to_last_question(messages: Any) -> Any:
    """Drop answers behind the last user turn: the target is to write them."""
    if not isinstance(messages, list):
        return messages
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "user" not in roles:
        raise RowRejectedError("no_user_turn", "nothing in it asks for an answer")
    return messages[: len(roles) - roles[::-1].index("user")]
