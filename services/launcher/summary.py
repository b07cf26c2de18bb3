"""The one JSON line that a run ends with, from what its services wrote down.

A figure that no service left is null, never a guess.
"""

from pathlib import Path
from typing import Any

from services.launcher.config import LauncherConfig
from services.launcher.rundir import Checkpoint, first_and_last_checkpoints, read_object
from services.launcher.supervisor import Outcome


def summarize(config: LauncherConfig, outcome: Outcome, wall_seconds: float) -> dict[str, Any]:
    """Return the summary of a run that has ended."""
    directory = config.run.directory
    lengths = _acceptance_lengths(directory / "evaluations")
    workers = [read_object(path) for path in (directory / "workers").glob("*.summary.json")]
    held_out = {
        (worker.get("group"), worker.get("index")): worker.get("held_out_acceptance_length")
        for worker in workers
    }
    drafters = [
        {
            "group": first.group,
            "index": first.index,
            "step": last.step,
            "checkpoint": str(last.path),
            "acceptance_length_before": lengths.get(_key(first)),
            "acceptance_length_after": lengths.get(_key(last)),
            **_best(last.path.parent, lengths),
            "acceptance_length_held_out": held_out.get((first.group, first.index)),
        }
        for first, last in first_and_last_checkpoints(directory)
    ]
    main = drafters[0] if drafters else {}
    targets = [
        read_object(directory / f"target-{index}.summary.json")
        for index in range(config.target.replicas)
    ]
    return {
        "outcome": outcome.kind,
        "failed_service": outcome.failed.spec.name if outcome.failed else None,
        "run": config.run.name,
        "run_directory": str(directory),
        "wall_seconds": round(wall_seconds, 3),
        "acceptance_length_before": main.get("acceptance_length_before"),
        "acceptance_length_after": main.get("acceptance_length_after"),
        "acceptance_length_best": main.get("acceptance_length_best"),
        "acceptance_length_held_out": main.get("acceptance_length_held_out"),
        "tokens_per_second": _rate(workers),
        "rows_published": min(_rows(targets, "rows_published"), default=None),
        "rows_trained": min(_rows(targets, "rows_trained"), default=None),
        "rows_lost": max(_rows(targets, "rows_lost"), default=None),
        "rows_poison": max(_rows(targets, "rows_poison"), default=None),
        "rows_skipped": max(_rows(targets, "rows_skipped"), default=None),
        "rows_open": max(_rows(targets, "rows_open"), default=None),
        "drafters": drafters,
    }


def remove_old_summaries(directory: Path) -> None:
    """Remove the summaries of an earlier launch into the same directory."""
    for pattern in ("target-*.summary.json", "workers/*.summary.json"):
        for path in directory.glob(pattern):
            path.unlink()


def _acceptance_lengths(directory: Path) -> dict[Path, float]:
    """Return the headline lengths by checkpoint; of two of one checkpoint the newer counts."""
    files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    results = [read_object(path) for path in files]
    return {
        Path(result["checkpoint"]).resolve(): result["acceptance_length"]
        for result in results
        if "checkpoint" in result and "acceptance_length" in result and result.get("is_headline")
    }


def _best(series: Path, lengths: dict[Path, float]) -> dict[str, Any]:
    """Return what the evaluator's `best` link points at, and how that was measured."""
    link = series / "best"
    best = link.resolve() if link.is_dir() else None
    return {
        "best_checkpoint": None if best is None else str(series / best.name),
        "acceptance_length_best": None if best is None else lengths.get(best),
    }


def _key(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.resolve()


def _rate(workers: list[dict[str, Any]]) -> float | None:
    """Return the tokens a second of all workers together, in this launch."""
    rates = [worker["tokens_per_second"] for worker in workers if worker.get("tokens_per_second")]
    return round(sum(rates), 3) if rates else None


def _rows(targets: list[dict[str, Any]], key: str) -> list[int]:
    """Return a figure of each group, summed over the rings; nothing where a ring's is missing."""
    accounts = [target.get("groups", {}) for target in targets]
    groups = set.intersection(*map(set, accounts))
    return [sum(account[group][key] for account in accounts) for group in groups]
