"""The one JSON line that a run ends with, from what its services wrote down.

A figure that no service left is null, never a guess.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.launcher.config import LauncherConfig
from services.launcher.rundir import first_and_last_checkpoints, read_object
from services.launcher.supervisor import Outcome

_ROWS: dict[str, Callable[..., int | None]] = {
    "rows_published": min,
    "rows_trained": min,
    "rows_before": min,
    "rows_lost": max,
    "rows_poison": max,
    "rows_skipped": max,
    "rows_open": max,
}
"""Figures of rows, each with what makes one of several groups' figures: the worst counts."""


def summarize(config: LauncherConfig, outcome: Outcome, wall_seconds: float) -> dict[str, Any]:
    """Return the summary of a run that has ended."""
    directory = config.run.directory
    results = _headlines(directory / "evaluations")
    workers = [read_object(path) for path in (directory / "workers").glob("*.summary.json")]
    by_drafter = {(worker.get("group"), worker.get("index")): worker for worker in workers}
    drafters = [
        {
            "group": first.group,
            "index": first.index,
            "step": last.step,
            **_drafter(first.path, last.path, results),
            **_last_words(by_drafter.get((first.group, first.index), {})),
        }
        for first, last in first_and_last_checkpoints(directory)
    ]
    main = drafters[0] if drafters else {}
    indexes = range(config.target.replicas)
    groups = _accounts([read_object(directory / f"target-{i}.summary.json") for i in indexes])
    return {
        "outcome": outcome.kind,
        "failed_service": outcome.failed.spec.name if outcome.failed else None,
        "failed_workers": list(outcome.lost),
        "run": config.run.name,
        "run_directory": str(directory),
        "wall_seconds": round(wall_seconds, 3),
        "acceptance_length_before": main.get("acceptance_length_before"),
        "acceptance_length_after": main.get("acceptance_length_after"),
        "acceptance_length_best": main.get("acceptance_length_best"),
        "acceptance_length_held_out": main.get("acceptance_length_held_out"),
        "tokens_per_second": _rate(workers),
        **{
            figure: worst((group[figure] for group in groups.values()), default=None)
            for figure, worst in _ROWS.items()
        },
        "groups": groups,
        "drafters": drafters,
    }


def remove_old_summaries(directory: Path) -> None:
    """Remove the summaries of an earlier launch into the same directory."""
    for pattern in ("target-*.summary.json", "workers/*.summary.json"):
        for path in directory.glob(pattern):
            path.unlink()


def _headlines(directory: Path) -> dict[Path, dict[str, Any]]:
    """Return the headline results by checkpoint; of two of one checkpoint the newer counts."""
    files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    results = [read_object(path) for path in files]
    return {
        Path(result["checkpoint"]).resolve(): result
        for result in results
        if "checkpoint" in result and "acceptance_length" in result and result.get("is_headline")
    }


def _figure(results: dict[Path, dict[str, Any]], checkpoint: Path, name: str) -> float | None:
    return results.get(checkpoint.resolve(), {}).get(name)


def _drafter(first: Path, last: Path, results: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return what evaluations say of a drafter's first, last and best checkpoint."""
    link = last.parent / "best"  # the evaluator's
    best = last.parent / link.resolve().name if link.is_dir() else None
    return {
        "checkpoint": str(last),
        "acceptance_length_before": _figure(results, first, "acceptance_length"),
        "acceptance_length_after": _figure(results, last, "acceptance_length"),
        "speedup_after": _figure(results, last, "speedup"),
        "best_checkpoint": best and str(best),
        "acceptance_length_best": best and _figure(results, best, "acceptance_length"),
    }


def _last_words(worker: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker says of its drafter at its last step."""
    return {
        "loss": worker.get("loss"),
        "acceptance_length_held_out": worker.get("held_out_acceptance_length"),
    }


def _rate(workers: list[dict[str, Any]]) -> float | None:
    """Return the tokens a second of all workers together, in this launch."""
    rates = [worker["tokens_per_second"] for worker in workers if worker.get("tokens_per_second")]
    return round(sum(rates), 3) if rates else None


def _accounts(targets: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the rows of each group, summed over the rings; nothing where a ring's are missing."""
    accounts = [target.get("groups", {}) for target in targets]
    names = set.intersection(*map(set, accounts))
    return {
        name: {figure: sum(account[name][figure] for account in accounts) for figure in _ROWS}
        for name in sorted(names)
    }
