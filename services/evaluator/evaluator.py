"""The evaluator's loop.

    prompts    --> plain decoding, once ----------------------> compare token by token --> report
    checkpoint --> drafter --> speculative decoding --> replay walk --^                      |
                                                          `best` and alarm of its series <---'

    consumes    prompts, checkpoints       produces      evaluations/*.json, curves, heartbeats, `best`
    waits for   checkpoints, where it      unblocked by  the end of training; a stop, which ends it
                follows a run                            behind a pass

The target is loaded once. Greedy speculative decoding writes what plain decoding writes, up to
counted float ties; anything else is an error of this program, and the run ends with it.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from common.contracts.control_messages import Command, EvaluationResult, EvaluatorReport, Phase
from common.errors import CaptureMismatchError, CheckpointError
from common.telemetry.control_link import ServiceState
from common.telemetry.late import LateService
from common.telemetry.metrics import MetricsLog
from services.evaluator.build import Arm, Bench, build_bench
from services.evaluator.checkpoints import (
    find_checkpoints,
    follow_checkpoints,
    read_fitting_spec,
    result_name,
    step_of,
)
from services.evaluator.config import EvaluatorConfig
from services.evaluator.decode import BatchDecoder, Text
from services.evaluator.passes import Passes, num_columns_for
from services.evaluator.prompts import Prompt
from services.evaluator.replay import Replay
from services.evaluator.report import PromptRecord, curves, describe, summarise, write_report
from services.evaluator.seat import DrafterSeat
from services.evaluator.series import SeriesRecord
from services.evaluator.ties import Difference, find_difference

# The first ones compile, capture and replay on a GPU; on a CPU one fills the caches.
_WARMUP_PASSES = {"cuda": 4, "cpu": 1}
# So many fit a heartbeat, with all their tags; the control plane keeps what it has seen.
_KEPT_RESULTS = 16
_log = logging.getLogger(__name__)


def evaluate(config: EvaluatorConfig, stop: threading.Event, late: LateService) -> None:
    """Load and evaluate; `late` is what the control plane hears meanwhile."""
    status = Status(stop)
    status.is_following = config.evaluation.follow
    late.bind(status)
    known, source = _find(config, stop, status)
    if known:
        bench = build_bench(config, known)
        status.phase = "running"
        Evaluator(config, bench, status, stop).run(source)
    status.phase = "done"


class Status:
    """What heartbeats say: written by the main thread, read by the link's."""

    def __init__(self, stop: threading.Event) -> None:
        self.newest_first = threading.Event()
        """The newest checkpoints are to come before older ones."""
        self._stop = stop
        self.phase: Phase = "loading"
        self.detail = ""
        self.num_done = 0
        self.num_total = 0
        self.is_following = False
        self.results: tuple[EvaluationResult, ...] = ()
        self._progress = 0

    def describe(self) -> ServiceState:
        """Return the state; progress is passes and looks, for answers may be long."""
        report = EvaluatorReport(
            num_done=self.num_done, num_total=self.num_total, is_following=self.is_following,
            results=self.results,
        )  # fmt: skip
        return ServiceState(self.phase, self.detail, self._progress, report)

    def obey(self, command: Command) -> None:
        """Stop behind the current pass, or take the newest checkpoints next; no other is for it."""
        if command.name in ("stop", "drain"):
            self._stop.set()
        elif command.name == "evaluate":
            self.newest_first.set()

    def note(self, num_answers: int) -> None:
        """Note a pass, or a look for checkpoints, and the answers that it has ended."""
        self.num_done += num_answers
        self._progress += 1


class Evaluator:
    """Decodes the prompts plainly once, then with the drafter of each checkpoint."""

    def __init__(
        self, config: EvaluatorConfig, bench: Bench, status: Status, stop: threading.Event
    ) -> None:
        self._config = config
        self._bench = bench
        self._status = status
        self._stop = stop
        self._warm: set[tuple[Passes, int]] = set()
        self._settings = _settings(config, bench)
        self._directory = config.run.directory / "evaluations"
        self._series = SeriesRecord(
            config.run.directory, self._settings, config.evaluation.alarm_share
        )
        most = max(len(arm.prompts) for arm in bench.arms)
        self._num_rows = min(config.evaluation.batch_size, most)
        self._num_answers = sum(len(arm.prompts) for arm in bench.arms)

    def run(self, checkpoints: Iterable[Path]) -> None:
        """Evaluate every checkpoint; raise behind the first that decoded another text."""
        self._status.num_total = self._num_answers
        plain = self._decode_plainly()
        seat = DrafterSeat(
            self._bench,
            num_rows=self._num_rows,
            replay_batch=self._config.evaluation.replay_batch,
        )
        with contextlib.closing(seat):
            for checkpoint in checkpoints:
                if plain is None or not self._evaluate(checkpoint, seat, plain):
                    _log.info("stopped: checkpoint %s and what follows are left out", checkpoint)
                    return

    def _decode_plainly(self) -> list[list[Text]] | None:
        """Return the answers of each arm without a drafter; None where a stop came first."""
        longest = num_columns_for(self._bench.longest_text)
        passes = Passes(self._bench.model, num_rows=self._num_rows, num_columns=longest)
        texts = []
        for arm in self._bench.arms:
            answers = self._decode(passes, arm, "plain decoding")
            if answers is None:
                return None
            texts.append(answers)
        return texts

    def _evaluate(self, checkpoint: Path, seat: DrafterSeat, plain: list[list[Text]]) -> bool:
        """Evaluate and report one checkpoint in all arms; say whether no stop came first."""
        is_followed = self._config.evaluation.follow
        if is_followed and self._series.has(checkpoint):
            return True
        try:
            seat.load(checkpoint, read_fitting_spec(checkpoint, self._bench.target))
        except CheckpointError:
            if not is_followed or checkpoint.exists():
                raise
            _log.warning("checkpoint %s went before it could be evaluated", checkpoint)
            return True
        self._status.num_total += self._num_answers
        measured = []
        for arm, texts in zip(self._bench.arms, plain, strict=True):
            records = self._examine(seat, checkpoint, arm, texts)
            if records is None:
                return False
            measured.append((arm, records))
        # The headline last: where its report is, the others' are.
        for arm, records in reversed(measured):
            self._report(checkpoint, arm, records)
        for _, records in measured:
            check_same_text(checkpoint, records)
        return True

    def _examine(
        self, seat: DrafterSeat, checkpoint: Path, arm: Arm, plain: list[Text]
    ) -> list[PromptRecord] | None:
        texts = self._decode(seat.passes, arm, result_name(checkpoint))
        if texts is None:
            return None
        return [
            PromptRecord(
                id=prompt.id,
                tag=prompt.tag,
                num_prompt_tokens=len(prompt.token_ids),
                plain=expected,
                speculative=text,
                replay=self._replay(seat, arm, prompt, text),
                difference=self._difference(arm, prompt, expected, text),
            )
            for prompt, expected, text in zip(arm.prompts, plain, texts, strict=True)
        ]

    def _replay(self, seat: DrafterSeat, arm: Arm, prompt: Prompt, text: Text) -> Replay | None:
        if arm.temperature:
            return None
        return seat.walker.walk(seat.context(), prompt.token_ids, text.token_ids, text.passes)

    def _difference(self, arm: Arm, prompt: Prompt, expected: Text, got: Text) -> Difference | None:
        if arm.temperature:  # other random numbers, another text
            return None
        return find_difference(
            self._bench.model, prompt.token_ids, expected.token_ids, got.token_ids,
            self._bench.tolerance,
        )  # fmt: skip

    def _decode(self, passes: Passes, arm: Arm, title: str) -> list[Text] | None:
        self._status.detail = f"{title}{arm.title}"
        decoder = BatchDecoder(passes, self._bench.limit, is_sampled=bool(arm.temperature))
        if (passes, arm.temperature) not in self._warm:
            self._warm.add((passes, arm.temperature))
            num_passes = _WARMUP_PASSES[self._bench.model.device.type]
            decoder.warm_up(arm.requests[:1], num_passes)  # of a fixed shape, the batch is whole
        return decoder.decode(arm.requests, self._stop, self._status.note)

    def _report(self, checkpoint: Path, arm: Arm, records: list[PromptRecord]) -> None:
        result = summarise(
            checkpoint,
            step_of(checkpoint),
            records,
            self._config.evaluation.context_buckets,
            arm=arm.name,
            temperature=float(arm.temperature),
            is_headline=arm.is_headline,
        )
        result = self._series.judge(result)
        path = self._directory / f"{result_name(checkpoint)}{arm.title}.json"
        write_report(path, result, records, settings=self._settings)
        with MetricsLog(self._config.run.directory / "metrics" / "evaluator.jsonl") as metrics:
            metrics.write(result.step, **curves(result))
        self._status.results = (*self._status.results, result)[-_KEPT_RESULTS:]
        _log.info("%s%s: %s", checkpoint, arm.title, describe(result))


def check_same_text(checkpoint: Path, records: list[PromptRecord]) -> None:
    """Raise where a drafter changed what the target writes, or the replay what it drafts."""
    for record in records:
        difference = record.difference
        if difference is not None and not difference.is_tie:
            raise CaptureMismatchError(
                f"checkpoint {str(checkpoint)!r}, prompt {record.id!r}: speculative decoding wrote "
                f"token {difference.got} at position {difference.position} of the answer, expected "
                f"{difference.expected} as plain decoding; their logits lie {difference.gap:.2e} "
                f"of the largest apart, which is no float tie; do not use these figures"
            )
        if record.replay is not None and record.replay.num_differences:
            raise CaptureMismatchError(
                f"checkpoint {str(checkpoint)!r}, prompt {record.id!r}: "
                f"{record.replay.num_differences} drafts of the replay walk differ from those of "
                f"decoding at the same anchors, which no float tie explains, expected none; the "
                f"features of a prefill are not those of decoding"
            )


def _find(
    config: EvaluatorConfig, stop: threading.Event, status: Status
) -> tuple[list[Path], Iterable[Path]]:
    """Return the checkpoints that are known at the start, and all of them as they come."""
    run, table = config.run, config.evaluation
    if not table.follow:
        known = find_checkpoints(table.checkpoints, run.directory)
        return known, known

    def has_ended() -> bool:
        status.note(0)
        status.detail = "looks for checkpoints"
        return run.training_ended.exists()

    coming = follow_checkpoints(run.directory, stop, status.newest_first, has_ended)
    first = list(islice(coming, 1))
    return first, chain(first, coming)


def _settings(config: EvaluatorConfig, bench: Bench) -> dict[str, Any]:
    """Return what must be alike for two figures to be compared; JSON as it is read back."""
    table = config.evaluation
    settings = {
        "target": bench.target.model,
        "target_fingerprint": bench.target.fingerprint,
        "sources": [[str(each.path), each.tag_name] for each in table.prompt_sources],
        "arms": {name: arm.chat_template_kwargs for name, arm in table.arms.items()},
        "temperature": list(table.temperature),
        "chat_template_kwargs": config.target.chat_template_kwargs,
        "max_prompts": table.max_prompts,
        "max_new_tokens": table.max_new_tokens,
        "batch_size": table.batch_size,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
    }
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found
