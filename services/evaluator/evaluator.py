"""The evaluator's loop.

    prompts    --> plain decoding, once ----------------------> compare token by token --> report
    checkpoint --> drafter --> speculative decoding --> replay walk --^

    consumes    prompts, checkpoints       produces      evaluations/*.json, curves, heartbeats
    waits for   nothing                    unblocked by  a stop, which ends it behind a prompt

The target is loaded once. Speculative decoding writes what plain decoding writes, up to counted
float ties; anything else is an error of this program, and the run ends with it.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from common.contracts.control_messages import Command, EvaluationResult, EvaluatorReport, Phase
from common.drafters.dflash.checkpoint import read_drafter
from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.model import DFlashDrafter
from common.errors import CaptureMismatchError
from common.target.features import FeatureTap
from common.telemetry.control_link import ControlLink, Identity, ServiceState
from common.telemetry.metrics import MetricsLog
from services.evaluator.build import Bench, build_bench
from services.evaluator.checkpoints import result_name, step_of
from services.evaluator.config import EvaluatorConfig
from services.evaluator.decode import (
    CachedTarget,
    GreedyProposer,
    PlainText,
    SpeculativeText,
    TextLimit,
    decode_plainly,
    decode_speculatively,
)
from services.evaluator.prompts import Prompt
from services.evaluator.replay import ReplayWalker
from services.evaluator.report import PromptRecord, summarise, write_report
from services.evaluator.ties import find_difference

_WARMUP_TOKENS = 8
_log = logging.getLogger(__name__)


def evaluate(config: EvaluatorConfig, stop: threading.Event) -> None:
    """Load, evaluate, and report to the control plane meanwhile."""
    status = Status()
    run = config.run
    with ControlLink(
        Identity("evaluator", "evaluator", run.name),
        run.directory / "control.sock",
        interval_seconds=config.control_plane.heartbeat_seconds,
        describe=status.describe,
        on_command=partial(_obey, stop),
    ) as link:
        bench = build_bench(config)
        status.phase = "running"
        link.report_soon()
        Evaluator(config, bench, status, stop).run()
        status.phase = "done"


class Status:
    """What heartbeats say: written by the main thread, read by the link's."""

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self.detail = ""
        self.num_done = 0
        self.num_total = 0
        self.results: tuple[EvaluationResult, ...] = ()

    def describe(self) -> ServiceState:
        """Return the state; progress is answers decoded, plain ones included."""
        report = EvaluatorReport(
            num_done=self.num_done, num_total=self.num_total, results=self.results
        )
        return ServiceState(self.phase, self.detail, self.num_done, report)


class Evaluator:
    """Decodes the prompts plainly once, then with the drafter of each checkpoint."""

    def __init__(
        self, config: EvaluatorConfig, bench: Bench, status: Status, stop: threading.Event
    ) -> None:
        self._config = config
        self._bench = bench
        self._status = status
        self._stop = stop
        self._target = CachedTarget(bench.model)
        self._warmup = TextLimit(frozenset(), _WARMUP_TOKENS)
        status.num_total = len(bench.prompts) * (1 + len(bench.checkpoints))

    def run(self) -> None:
        """Evaluate every checkpoint; raise behind the first that decoded another text."""
        plain = self._decode_plainly()
        for checkpoint in self._bench.checkpoints:
            records = self._evaluate(checkpoint, plain)
            if self._stop.is_set():
                _log.info("stopped: checkpoint %s and what follows are not evaluated", checkpoint)
                return
            self._report(checkpoint, records)
            check_same_text(checkpoint, records)

    def _decode_plainly(self) -> list[PlainText]:
        bench = self._bench
        decode_plainly(self._target, bench.prompts[0].token_ids, self._warmup)
        return [
            decode_plainly(self._target, prompt.token_ids, bench.limit)
            for prompt in self._each_prompt("plain decoding")
        ]

    def _evaluate(self, checkpoint: Path, plain: list[PlainText]) -> list[PromptRecord]:
        bench = self._bench
        drafter = read_drafter(checkpoint, bench.model.device, bench.model.dtype)
        with FeatureTap(bench.model, drafter.spec.target_layer_ids) as tap:
            self._speculate(tap, drafter, bench.prompts[0].token_ids, self._warmup)
            prompts = self._each_prompt(result_name(checkpoint))
            return [
                self._examine(tap, drafter, prompt, text)
                for prompt, text in zip(prompts, plain, strict=False)  # a stop shortens both
            ]

    def _examine(
        self, tap: FeatureTap, drafter: DFlashDrafter, prompt: Prompt, plain: PlainText
    ) -> PromptRecord:
        bench, batch = self._bench, self._config.evaluation.replay_batch
        text = self._speculate(tap, drafter, prompt.token_ids, bench.limit)
        walker = ReplayWalker(bench.model, tap, tolerance=bench.tolerance, batch=batch)
        context = DraftContext(drafter, bench.embedding, bench.head)
        return PromptRecord(
            id=prompt.id,
            num_prompt_tokens=len(prompt.token_ids),
            plain=plain,
            speculative=text,
            replay=walker.walk(context, prompt.token_ids, text.token_ids, text.blocks),
            difference=find_difference(
                bench.model, prompt.token_ids, plain.token_ids, text.token_ids, bench.tolerance
            ),
        )

    def _speculate(
        self, tap: FeatureTap, drafter: DFlashDrafter, prompt: list[int], limit: TextLimit
    ) -> SpeculativeText:
        context = DraftContext(drafter, self._bench.embedding, self._bench.head)
        return decode_speculatively(
            self._target, tap.aux_hidden_states, GreedyProposer(context), prompt, limit
        )

    def _each_prompt(self, title: str) -> Iterator[Prompt]:
        """Yield the prompts until a stop, and count them as they are done."""
        self._status.detail = title
        bar = track(
            self._bench.prompts,
            title,
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        for prompt in bar:
            if self._stop.is_set():
                return
            yield prompt
            self._status.num_done += 1

    def _report(self, checkpoint: Path, records: list[PromptRecord]) -> None:
        directory, table = self._config.run.directory, self._config.evaluation
        result = summarise(checkpoint, step_of(checkpoint), records)
        write_report(
            directory / "evaluations" / f"{result_name(checkpoint)}.json",
            result,
            records,
            prompts_file=str(table.prompts),
            max_new_tokens=table.max_new_tokens,
            dtype=str(self._bench.model.dtype).removeprefix("torch."),
            target=self._bench.target.model,
            target_fingerprint=self._bench.target.fingerprint,
        )
        with MetricsLog(directory / "metrics" / "evaluator.jsonl") as metrics:
            metrics.write(result.step, **_curves(result))
        self._status.results = (*self._status.results, result)
        _log.info(
            "%s: acceptance length %.3f live, %.3f replayed, speed-up %.2f, %d float ties, "
            "%d mismatches",
            checkpoint, result.acceptance_length, result.replay_acceptance_length, result.speedup,
            result.num_float_ties, result.num_mismatches,
        )  # fmt: skip


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
        if record.replay.num_differences:
            raise CaptureMismatchError(
                f"checkpoint {str(checkpoint)!r}, prompt {record.id!r}: "
                f"{record.replay.num_differences} drafts of the replay walk differ from those of "
                f"decoding at the same anchors, which no float tie explains, expected none; the "
                f"features of a prefill are not those of decoding"
            )


def _obey(stop: threading.Event, command: Command) -> None:
    """Stop behind the current prompt; other commands are not for an evaluator."""
    if command.name in ("stop", "drain"):
        stop.set()


def _curves(result: EvaluationResult) -> dict[str, float | str]:
    rates = {
        f"eval/acceptance_rate_at/{k}": rate for k, rate in enumerate(result.acceptance_rate_at, 1)
    }
    return {
        "checkpoint": result.checkpoint,
        "eval/acceptance_length": result.acceptance_length,
        "eval/replay_acceptance_length": result.replay_acceptance_length,
        "eval/speedup": result.speedup,
        **rates,
    }
