"""Has the target write its own answers to prompts: the text that its drafter learns from.

    prompts.jsonl --(chat template)--> batches by length --(generate)--> output.jsonl

Reads `{"id"?, "messages": [...]}` a line and appends `{"id", "messages", "finish_reason"}`, whose
last message is the target's answer; what follows the input's last user turn is written anew. An
answer that was cut has finish_reason "length". Each batch is on disk before the next begins: a
run that was killed goes on where it stopped and never writes an id twice.
"""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import Field

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import RunTable, TargetTable
from common.errors import ConfigError, RingdraftError, RowRejectedError
from common.telemetry import logs
from services.target_server.progress import Progress

if TYPE_CHECKING:
    from services.target_server.generation import Answer, AnswerWriter

_log = logging.getLogger(__name__)


class RegenerationTable(Table):
    """[regeneration]: prompts to answer and how."""

    prompts: Path
    """JSONL file of prompts."""
    output: Path
    """JSONL file to which the answered conversations are appended."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Length at which an answer is cut."""
    batch_size: int = Field(default=32, ge=1)
    """Prompts that are answered together."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class RegenerateConfig(Table):
    """What `python -m services.target_server.regenerate` reads."""

    run: RunTable = RunTable()
    target: TargetTable
    regeneration: RegenerationTable


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the answer that is to be written."""

    id: str
    messages: list[dict[str, Any]]
    token_ids: list[int]


def run(config: RegenerateConfig) -> None:
    """Answer every prompt that the output does not have yet."""
    table = config.regeneration
    done = _answered_ids(table.output)
    waiting = [(key, messages) for key, messages in _read(table.prompts) if key not in done]
    _log.info("%s: %d answered, %d to do", table.output, len(done), len(waiting))
    if waiting:
        prompts, writer = _build(config, waiting)
        _answer_all(table, prompts, writer)


def _build(
    config: RegenerateConfig, waiting: list[tuple[str, list[dict[str, Any]]]]
) -> tuple[list[Prompt], "AnswerWriter"]:
    """Load tokenizer and target, and tokenize the prompts, the shortest first."""
    import torch

    from common.target.loading import load_target, load_tokenizer
    from services.target_server.generation import AnswerWriter

    if config.run.num_threads:
        torch.set_num_threads(config.run.num_threads)
    tokenizer = load_tokenizer(config.target)
    prompts = _tokenize(tokenizer, waiting, config.target.chat_template_kwargs)
    writer = AnswerWriter(
        load_target(config.target, config.run.device),
        tokenizer,
        max_new_tokens=config.regeneration.max_new_tokens,
        temperature=config.regeneration.temperature,
        seed=config.run.seed,
    )
    return prompts, writer


def _answer_all(table: RegenerationTable, prompts: list[Prompt], writer: "AnswerWriter") -> None:
    reasons: Counter[str] = Counter()
    table.output.parent.mkdir(parents=True, exist_ok=True)
    with (
        table.output.open("a", encoding="utf-8") as output,
        Progress("answers", len(prompts)) as progress,
    ):
        for start in range(0, len(prompts), table.batch_size):
            batch = prompts[start : start + table.batch_size]
            answers = writer.answer([prompt.token_ids for prompt in batch])
            output.writelines(map(_line, batch, answers))
            output.flush()
            os.fsync(output.fileno())
            reasons.update(answer.finish_reason for answer in answers)
            progress.advance(len(batch), sum(answer.num_tokens for answer in answers))
    _log.info("%d answers ended by themselves, %d were cut at %d tokens",
              reasons["stop"], reasons["length"], table.max_new_tokens)  # fmt: skip


def _tokenize(
    tokenizer: Any, waiting: list[tuple[str, list[dict[str, Any]]]], kwargs: dict[str, Any]
) -> list[Prompt]:
    from common.target.chat import render_prompt

    prompts = []
    for key, messages in waiting:
        try:
            prompts.append(Prompt(key, messages, render_prompt(tokenizer, messages, kwargs)))
        except RowRejectedError as error:
            _log.warning("prompt %r skipped: %s", key, error)
    return sorted(prompts, key=lambda prompt: len(prompt.token_ids))


def _read(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield id and messages up to the last user turn of each usable line, each id once."""
    if not path.is_file():
        raise ConfigError(f"regeneration.prompts={str(path)!r}: no such file; give a JSONL file")
    seen = set()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            messages = _messages_to_answer(line)
            if messages is None:
                if line.strip():
                    _log.warning("%s line %d skipped: no JSON with a user turn", path, number)
                continue
            key = json.loads(line).get("id") or xxhash.xxh3_64_hexdigest(
                json.dumps(messages).encode()
            )
            key = str(key)
            if key in seen:
                _log.warning("%s line %d skipped: id %r occurred before", path, number, key)
                continue
            seen.add(key)
            yield key, messages


def _messages_to_answer(line: str) -> list[dict[str, Any]] | None:
    try:
        messages = json.loads(line)["messages"]
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    except (ValueError, KeyError, TypeError):
        return None
    return messages[: turns[-1] + 1] if turns else None


def _answered_ids(output: Path) -> set[str]:
    """Return the ids in the output, and cut off a last line that a kill left unfinished."""
    if not output.is_file():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(output, len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


def _line(prompt: Prompt, answer: "Answer") -> str:
    messages = [*prompt.messages, {"role": "assistant", "content": answer.content}]
    record = {"id": prompt.id, "messages": messages, "finish_reason": answer.finish_reason}
    return json.dumps(record, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit code."""
    try:
        config = parse(RegenerateConfig, "target_server.regenerate", arguments)
        if config is not None:
            logs.configure("regenerate", "0", config.run.name, config.run.log_level)
            run(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except RingdraftError:
        _log.critical("regeneration ends", exc_info=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
