"""Reads held-out prompts: JSON lines of {"id"?, "tag"?, "messages"} or {"prompt"}, rendered up to
the target's answer."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import ConfigError, RowRejectedError
from common.target.chat import render_prompt
from services.evaluator.config import PromptSourceTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target begins to write."""

    id: str
    token_ids: list[int]
    tag: str


def read_prompts(
    sources: Sequence[PromptSourceTable],
    tokenizer: Tokenizer,
    kwargs: dict[str, Any],
    *,
    max_prompts: int,
    max_tokens: int,
) -> list[Prompt]:
    """Return the first usable prompts of each file; raise where a file has none.

    Args:
        kwargs: arguments of the chat template.
        max_prompts: of each file.
        max_tokens: longest prompt that leaves room for an answer.
    """
    prompts: list[Prompt] = []
    for source in sources:
        usable = _usable(source, tokenizer, kwargs, max_tokens)
        found = list(islice(usable, max_prompts))
        if not found:
            raise ConfigError(
                f"evaluation.prompts={str(source.path)!r}: got no usable prompt, expected lines of "
                f'{{"messages": [...]}} or {{"prompt": "..."}}; see the warnings above'
            )
        prompts += found
    return prompts


def _usable(
    source: PromptSourceTable, tokenizer: Tokenizer, kwargs: dict[str, Any], max_tokens: int
) -> Iterator[Prompt]:
    """Yield the prompts of a file; warn of each that cannot be used."""
    for key, tag, messages in _conversations(source.path):
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
        yield Prompt(key, token_ids, tag or source.tag_name)


def _conversations(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield id, tag and messages of each line that has them; the line's number serves as the id."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                yield str(record.get("id", number)), str(record.get("tag", "")), _messages(record)
            except (ValueError, KeyError, AttributeError):
                _log.warning(
                    "%s line %d skipped: no JSON object with messages or a prompt", path, number
                )


def _messages(record: dict[str, Any]) -> Any:
    if isinstance(record.get("prompt"), str) and "messages" not in record:
        return [{"role": "user", "content": record["prompt"]}]
    return record["messages"]


def _up_to_last_question(messages: Any) -> Any:
    """Drop answers behind the last user turn: the target is to write them."""
    if not isinstance(messages, list):
        return messages
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "user" not in roles:
        raise RowRejectedError("no_user_turn", "nothing in it asks for an answer")
    return messages[: len(roles) - roles[::-1].index("user")]
