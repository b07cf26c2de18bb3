"""Runs with several target servers, each with a ring of its own, through real processes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_run, run_to_end, segments_of, start, train, watched

UP = ("services.launcher.cli", "up")


def summary_of(done: subprocess.CompletedProcess) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def account_of(directory: Path, target: int) -> dict[str, int]:
    summary = json.loads((directory / "run" / f"target-{target}.summary.json").read_text())
    return summary["groups"]["main"]


def trainer_state(directory: Path, worker: int = 0) -> dict[str, Any]:
    steps = sorted((directory / "run" / "checkpoints" / "main" / str(worker)).glob("step-*"))
    return json.loads((steps[-1] / "trainer" / "state.json").read_text())


@pytest.mark.timeout(300)
def test_one_command_runs_two_targets_whose_rows_add_up(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=300)
    with watched(tmp_path / "run") as seen:
        done = run_to_end(
            *UP, "--config", config, "--set", "target.replicas=2", "--set",
            "launcher.evaluate=false", "--set", "training.checkpoint_steps=50",
        )  # fmt: skip
    summary = summary_of(done)
    accounts = [account_of(tmp_path, target) for target in (0, 1)]
    assert summary["rows_published"] == summary["rows_trained"] > 80
    assert summary["rows_lost"] == summary["rows_open"] == 0
    first, second = (account["rows_published"] for account in accounts)
    assert (first + second, first - second) == (summary["rows_published"], first - second)
    assert first - second in (0, 1), "rows take turns"
    worker = trainer_state(tmp_path)
    assert worker["trained_rows"] == worker["consumed"]["low"] == summary["rows_published"]
    both = [status for status in seen if len(status["rings"]) == 2]
    assert both
    assert {ring["instance"] for ring in both[-1]["rings"]} == {"target-0", "target-1"}
    assert {status["target"]["total_rows"] for status in both} == {summary["rows_published"]}
    (group,) = both[-1]["groups"]
    published = sum(ring["groups"][0]["published"] for ring in both[-1]["rings"])
    assert group["account"]["published"] == published
    assert not segments_of(tmp_path)
    assert not list((tmp_path / "run").glob("*.sock"))


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
