"""Runs with several target servers, each with a ring of its own, through real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_run, run_to_end, start, train


def account_of(directory: Path, target: int) -> dict[str, int]:
    summary = json.loads((directory / "run" / f"target-{target}.summary.json").read_text())
    return summary["groups"]["main"]


def trainer_state(directory: Path, worker: int = 0) -> dict[str, Any]:
    steps = sorted((directory / "run" / "checkpoints" / "main" / str(worker)).glob("step-*"))
    return json.loads((steps[-1] / "trainer" / "state.json").read_text())


def train_in_part(config: Path) -> None:
    """Train 11 rows of two targets, and ask the targets to end."""
    options = ("--config", config, "--set", "target.replicas=2")
    logs = config.parent / "run" / "logs"
    targets = [start("services.target_server", *options, log=logs / f"{n}.log") for n in "ab"]
    try:
        worker = run_to_end(
            "services.drafter_worker", *options, "--set", "training.max_steps=11"
        )  # fmt: skip
        assert worker.returncode == 0, worker.stderr
        for target in targets:
            target.terminate()
            assert target.wait(60) == 0
    finally:
        for target in targets:
            target.kill()


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_another_number_of_targets_and_trains_each_row_once(
    tmp_path: Path,
) -> None:
    config = make_run(tmp_path)
    train_in_part(config)
    before = trainer_state(tmp_path)
    accounts = [account_of(tmp_path, target) for target in (0, 1)]
    assert before["trained_rows"] == sum(part["rows_trained"] for part in accounts) == 11
    (summary,) = train(config)
    rest = summary["groups"]["main"]
    after = trainer_state(tmp_path)
    total = after["consumed"]["low"]
    assert after["consumed"] == {"low": total, "above": []}
    assert after["trained_rows"] == total > 20
    assert rest["rows_published"] == rest["rows_trained"] == total - 11
    assert rest["rows_lost"] == 0
