"""What the checkpoints of one series had before: which is the best, and what has fallen below it.

    checkpoints/<group>/<index>/best -> step-000200      a link that retention respects

Only figures that were measured alike are compared: a report says in `settings` how it was.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.contracts.control_messages import EvaluationResult
from services.evaluator.checkpoints import is_of_a_run

BEST = "best"
_log = logging.getLogger(__name__)


class SeriesRecord:
    """The best headline figure of each series, from the reports of the run on disk."""

    def __init__(self, evaluations: Path, settings: Mapping[str, Any], alarm_share: float) -> None:
        self._alarm_share = alarm_share
        self._best: dict[Path, tuple[float, int]] = {}
        """By series: acceptance length and step."""
        self._measured: set[Path] = set()
        for path in sorted(evaluations.glob("*.json")):
            self._recall(path, settings)

    def has(self, checkpoint: Path) -> bool:
        """Say whether an earlier evaluation measured it in the same way."""
        return checkpoint.absolute() in self._measured

    def judge(self, result: EvaluationResult) -> EvaluationResult:
        """Return the result with what its series makes of it; a better headline becomes the best."""
        checkpoint = Path(result.checkpoint).absolute()
        if not result.is_headline or not is_of_a_run(checkpoint):
            return result
        length = result.acceptance_length
        best, at_step = self._best.get(checkpoint.parent, (-1.0, result.step))
        if length > best:
            best, at_step = length, result.step
            self._best[checkpoint.parent] = (best, at_step)
            mark_best(checkpoint)
        # A step from before the best was never better.
        has_regressed = at_step < result.step and length < best * (1 - self._alarm_share)
        if has_regressed:
            _log.warning(
                "alarm: %s has acceptance length %.3f, %.1f %% below the best of its series, %.3f; "
                "more training may make it worse, %s is kept",
                checkpoint, length, 100 * (1 - length / best), best, checkpoint.parent / BEST,
            )  # fmt: skip
        return result.model_copy(
            update={"best_acceptance_length": best, "has_regressed": has_regressed}
        )

    def _recall(self, path: Path, settings: Mapping[str, Any]) -> None:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            checkpoint = Path(report["checkpoint"]).absolute()
            is_alike = report["settings"] == settings and report["is_headline"]
            length, step = float(report["acceptance_length"]), int(report["step"])
        except (OSError, ValueError, KeyError, TypeError):  # a report of another kind
            return
        if is_alike:
            self._measured.add(checkpoint)
            known = self._best.get(checkpoint.parent, (-1.0, 0))
            self._best[checkpoint.parent] = max(known, (length, step))


def mark_best(checkpoint: Path) -> None:
    """Point `best` at a checkpoint, at once; what retention has removed meanwhile is left out."""
    if not checkpoint.is_dir():
        _log.warning("%s is gone before it could be kept as best", checkpoint)
        return
    link = checkpoint.parent / BEST
    temporary = checkpoint.parent / f".{BEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name)
    temporary.replace(link)
