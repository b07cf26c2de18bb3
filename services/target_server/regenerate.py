"""`python -m services.target_server.regenerate`: answers to prompts, for a drafter to learn from.

    prompts --> turns in order --> the target itself, or a server that serves it --> output.jsonl

Reads whatever `[data]` reads, and appends `{"id", "messages", "finish_reason"}` with
every assistant turn written anew. A line is on disk before its conversation counts as answered: a
run that was killed goes on where it stopped and never writes an id twice. Stdout gets one JSON
line with the counts; people read stderr.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from common.config.command_line import parse
from common.errors import AnswerError, RowRejectedError
from common.lifecycle import run_service
from common.telemetry import logs
from services.target_server.answer_file import AnswerFile
from services.target_server.counts import SkipCounts
from services.target_server.dialogues import (
    Dialogue,
    UnusableRow,
    count_rows,
    open_prompts,
    read_dialogues,
)
from services.target_server.progress import Progress
from services.target_server.regeneration_config import RegenerateConfig, RegenerationTable

_log = logging.getLogger(__name__)


class Answers:
    """Where answered conversations go, and what is counted. A context manager."""

    def __init__(self, table: RegenerationTable) -> None:
        self._table = table
        self._stack = contextlib.ExitStack()
        self._left_out_path = table.output.with_name(f"{table.output.name}.left_out")
        self._left_out: AnswerFile | None = None
        self._started_at = time.monotonic()
        self.finish_reasons: Counter[str] = Counter()
        self.num_tokens = 0
        self.skipped = SkipCounts()
        self.failed = SkipCounts()

    def __enter__(self) -> "Answers":
        self._prompts = open_prompts(self._table.prompts)
        self._kept = self._stack.enter_context(AnswerFile(self._table.output))
        if self._left_out_path.exists():
            self._open_left_out()
        self.num_before = self.num_answered
        num_rows = count_rows(self._prompts)
        _log.info("%s: %d of %d answered", self._table.output, self.num_before, num_rows)
        self._progress = self._stack.enter_context(
            Progress("answers", max(num_rows - self.num_before, 0))
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def num_answered(self) -> int:
        """Conversations in the files, those of earlier runs included."""
        return len(self._kept.ids) + (len(self._left_out.ids) if self._left_out else 0)

    def waiting(self) -> Iterator[Dialogue]:
        """Yield the conversations that neither file has; count the lines that are none."""
        for dialogue in read_dialogues(self._prompts):
            if isinstance(dialogue, UnusableRow):
                self.skip(dialogue.error, dialogue.name)
            elif not self._has(dialogue.id):
                yield dialogue

    def add(self, dialogue: Dialogue) -> None:
        """Write an answered conversation."""
        if dialogue.finish_reason in self._table.keep_finish_reasons:
            self._kept.append(dialogue.record())
        else:
            (self._left_out or self._open_left_out()).append(dialogue.record())
        self.finish_reasons[dialogue.finish_reason] += 1
        self.num_tokens += dialogue.num_tokens
        self._progress.advance(1, dialogue.num_tokens)

    def skip(self, error: RowRejectedError, name: str) -> None:
        """Count a conversation that nobody can answer."""
        if error.reason not in self.skipped.counts:
            _log.warning("prompt %s is skipped: %s", name, error)
        self.skipped.add(error.reason, name)
        self._progress.advance(1, 0)

    def fail(self, name: str) -> None:
        """Count a conversation whose answer could not be had this time."""
        self.failed.add("no_answer", name)

    def summary(self) -> dict[str, Any]:
        """Return the counts of this run."""
        seconds = time.monotonic() - self._started_at
        return {
            "output": str(self._table.output),
            "answered_before": self.num_before,
            "answered": sum(self.finish_reasons.values()),
            "finish_reasons": dict(self.finish_reasons.most_common()),
            "skipped": self.skipped.counts,
            "failed": self.failed.total,
            "tokens": self.num_tokens,
            "tokens_per_second": round(self.num_tokens / max(seconds, 1e-9), 1),
        }

    def _has(self, name: str) -> bool:
        return name in self._kept.ids or (self._left_out is not None and name in self._left_out.ids)

    def _open_left_out(self) -> AnswerFile:
        self._left_out = self._stack.enter_context(AnswerFile(self._left_out_path))
        return self._left_out


def run(config: RegenerateConfig, stop: threading.Event) -> dict[str, Any]:
    """Answer every prompt that the output does not have yet, until a stop is asked for."""
    with Answers(config.regeneration) as answers:
        waiting = answers.waiting()
        first = next(waiting, None)
        if first is not None:
            _answer(config, answers, _chained(first, waiting), stop)
    if answers.skipped.total:
        _log.warning("skipped %d prompts: %s", answers.skipped.total, answers.skipped)
    return answers.summary()


def _answer(
    config: RegenerateConfig, answers: Answers, waiting: Iterator[Dialogue], stop: threading.Event
) -> None:
    # Each imported where it is wanted: a server's client needs no torch.
    if config.regeneration.server:
        from services.target_server.server_answers import answer_by_server

        answer_by_server(config, answers, waiting, stop)
    else:
        from services.target_server.target_answers import answer_by_target

        answer_by_target(config, answers, waiting, stop)


def _chained(first: Dialogue, others: Iterator[Dialogue]) -> Iterator[Dialogue]:
    yield first
    yield from others


def main(stop: threading.Event) -> None:
    """Regenerate by the command line.

    Raises:
        AnswerError: a server left prompts unanswered, or there are prompts and not one answer.
    """
    config = parse(RegenerateConfig, "target_server.regenerate")
    if config is None:
        return
    logs.configure("regenerate", "0", config.run.name, config.run.log_level)
    summary = run(config, stop)
    print(json.dumps(summary), flush=True)  # noqa: T201
    if summary["failed"]:
        raise AnswerError(
            f"{summary['failed']} prompts have no answer from {config.regeneration.server!r}; start "
            f"again to ask for them again"
        )
    if summary["skipped"] and not (
        summary["answered"] + summary["answered_before"] or stop.is_set()
    ):
        raise AnswerError(
            f"{summary['output']}: none of the prompts has an answer; skipped {summary['skipped']}; "
            f"the log says why, check the prompts, [generation] and [regeneration]"
        )


if __name__ == "__main__":
    sys.exit(run_service(main))
