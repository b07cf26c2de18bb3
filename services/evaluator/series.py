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
from common.drafters.dflash.checkpoint import CONFIG_FILE
from services.evaluator.checkpoints import is_of_a_run, step_of

BEST = "best"
_log = logging.getLogger(__name__)


class SeriesRecord:
    """Headline figures of each series of one run, from its reports on disk on."""

    def __init__(self, run: Path, settings: Mapping[str, Any], alarm_share: float) -> None:
        self._checkpoints = (run / "checkpoints").resolve()
        self._alarm_share = alarm_share
        self._lengths: dict[Path, dict[Path, float]] = {}
        """Acceptance lengths by series and checkpoint, all measured alike."""
        for path in sorted((run / "evaluations").glob("*.json")):
            self._recall(path, settings)

    def has(self, checkpoint: Path) -> bool:
        """Say whether an earlier evaluation measured it in the same way."""
        checkpoint = checkpoint.resolve()
        return checkpoint in self._lengths.get(checkpoint.parent, {})

    def judge(self, result: EvaluationResult) -> EvaluationResult:
        """Return the result with what its series makes of it; `best` goes to the best headline.

        A drafter of another place than the run is of no series.
        """
        checkpoint = Path(result.checkpoint).resolve()
        if not result.is_headline or not self._is_own(checkpoint):
            return result
        length = result.acceptance_length
        series = self._lengths.setdefault(checkpoint.parent, {})
        series[checkpoint] = length
        best = _best_of(series)
        _keep_best(series)
        # A step from before the best was never better.
        has_regressed = step_of(best) < result.step and length < series[best] * (
            1 - self._alarm_share
        )
        if has_regressed:
            _log.warning(
                "alarm: %s has acceptance length %.3f, %.1f %% below the best of its series, %.3f at "
                "step %d, which %s keeps",
                checkpoint, length, 100 * (1 - length / series[best]), series[best], step_of(best),
                checkpoint.parent / BEST,
            )  # fmt: skip
        return result.model_copy(
            update={"best_acceptance_length": series[best], "has_regressed": has_regressed}
        )

    def _is_own(self, checkpoint: Path) -> bool:
        return is_of_a_run(checkpoint) and checkpoint.parents[2] == self._checkpoints

    def _recall(self, path: Path, settings: Mapping[str, Any]) -> None:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            checkpoint = Path(report["checkpoint"]).resolve()
            is_alike = report["settings"] == settings and report["is_headline"]
            length = float(report["acceptance_length"])
            is_older = path.stat().st_mtime < (checkpoint / CONFIG_FILE).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):  # another report, or no checkpoint left
            return
        if is_alike and not is_older and self._is_own(checkpoint):
            self._lengths.setdefault(checkpoint.parent, {})[checkpoint] = length


def _best_of(series: Mapping[Path, float]) -> Path:
    """Return the best checkpoint, of equal ones the first."""
    return max(series, key=lambda path: (series[path], -step_of(path)))


def _keep_best(series: Mapping[Path, float]) -> None:
    """Point `best` at what is best of a series and still there.

    A link to what was not measured alike stays: nothing says that another one is better.
    """
    there = {path: length for path, length in series.items() if path.is_dir()}
    if not there:
        return
    best = _best_of(there)
    link = best.parent / BEST
    if link.is_dir() and link.resolve() not in series:
        _log.info("%s stays: it was not measured in this way", link)
    elif not link.is_dir() or link.resolve() != best:
        mark_best(best)


def mark_best(checkpoint: Path) -> None:
    """Point the series' `best` at a checkpoint, at once."""
    link = checkpoint.parent / BEST
    temporary = checkpoint.parent / f".{BEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name)
    temporary.replace(link)
