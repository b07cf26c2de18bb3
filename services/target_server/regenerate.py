"""Has the target write its own answers to prompts: the text that its drafter learns from.

    prompts.jsonl --(chat template)--> batches by length --(generate)--> output.jsonl

Reads `{"id"?, "messages": [...]}` a line and appends `{"id", "messages", "finish_reason"}`, whose
last message is the target's answer; what follows the input's last user turn is written anew. An
answer that was cut has finish_reason "length". Each batch is on disk before the next begins: a
run that was killed goes on where it stopped and never writes an id twice.
"""

import fcntl
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash
from pydantic import Field

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import RunTable, TargetTable
from common.errors import ConfigError, RowRejectedError
from common.lifecycle import run_service
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


def run(config: RegenerateConfig, stop: threading.Event) -> None:
    """Answer every prompt that the output does not have yet, until a stop is asked for."""
    table = config.regeneration
    with _open_output(table.output) as output:
        done = _answered_ids(output)
        waiting = [(key, messages) for key, messages in _read(table.prompts) if key not in done]
        _log.info("%s: %d answered, %d to do", table.output, len(done), len(waiting))
        if waiting:
            prompts, writer = _build(config, waiting)
            _answer_all(output, prompts, writer, table.batch_size, stop)


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


def _answer_all(
    output: IO[bytes],
    prompts: list[Prompt],
    writer: "AnswerWriter",
    batch_size: int,
    stop: threading.Event,
) -> None:
    reasons: Counter[str] = Counter()
    with Progress("answers", len(prompts)) as progress:
        for start in range(0, len(prompts), batch_size):
            if stop.is_set():
                break
            batch = prompts[start : start + batch_size]
            answers = writer.answer([prompt.token_ids for prompt in batch])
            output.write(b"".join(map(_line, batch, answers)))
            output.flush()
            os.fsync(output.fileno())
            reasons.update(answer.finish_reason for answer in answers)
            progress.advance(len(batch), sum(answer.num_tokens for answer in answers))
    _log.info("%d answers ended by themselves, %d were cut", reasons["stop"], reasons["length"])


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
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            key, messages = _prompt_in(line)
            if messages is None or key in seen:
                problem = "no JSON with a user turn" if messages is None else f"{key!r} again"
                _log.warning("%s line %d skipped: %s", path, number, problem)
                continue
            seen.add(key)
            yield key, messages


def _prompt_in(line: bytes) -> tuple[str, list[dict[str, Any]] | None]:
    """Return a line's id (a hash where it has none) and its messages up to the last user turn."""
    try:
        row = json.loads(line)
        messages = row["messages"]
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    except (ValueError, KeyError, TypeError):
        return "", None
    if not turns:
        return "", None
    messages = messages[: turns[-1] + 1]
    key = row.get("id")
    if key is None:
        key = xxhash.xxh3_64_hexdigest(json.dumps(messages).encode())
    return str(key), messages


def _open_output(path: Path) -> IO[bytes]:
    """Open for reading and appending, and lock: two runs would answer the same prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output = path.open("a+b")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        output.close()
        raise ConfigError(
            f"regeneration.output={str(path)!r}: another run is writing it; wait for its end or "
            f"choose another file"
        ) from error
    return output


def _answered_ids(output: IO[bytes]) -> set[str]:
    """Return the ids in the output, and cut off a last line that a kill left unfinished."""
    output.seek(0)
    content = output.read()
    whole = content[: content.rfind(b"\n") + 1]
    output.truncate(len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


def _line(prompt: Prompt, answer: "Answer") -> bytes:
    messages = [*prompt.messages, {"role": "assistant", "content": answer.content}]
    record = {"id": prompt.id, "messages": messages, "finish_reason": answer.finish_reason}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def main(stop: threading.Event) -> None:
    """Regenerate by the command line."""
    config = parse(RegenerateConfig, "target_server.regenerate")
    if config is not None:
        logs.configure("regenerate", "0", config.run.name, config.run.log_level)
        run(config, stop)


if __name__ == "__main__":
    sys.exit(run_service(main))
