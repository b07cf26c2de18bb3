"""Whole runs through real processes: a random tiny target teaches a drafter."""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_run, run_to_end, segments_of, start, target_names, watched

UP = "services.launcher.cli"


def trainer_state(run: Path, worker: int) -> dict[str, Any]:
    newest = max((run / "checkpoints" / "main" / str(worker)).glob("step-*"))
    return json.loads((newest / "trainer" / "state.json").read_text())


def losses(run: Path, instance: str) -> list[float]:
    lines = (run / "metrics" / f"{instance}.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@dataclass(frozen=True)
class Ended:
    """A run that one command has brought to its end, and what was seen of it."""

    folder: Path
    summary: dict[str, Any]
    seen: list[dict[str, Any]]

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of two targets and two workers."""
    folder = tmp_path_factory.mktemp("one-command")
    config = make_run(folder, num_conversations=400)
    settings = ("--set", "target.replicas=2", "--set", "training.checkpoint_steps=50")
    with watched(folder / "run") as seen:
        done = run_to_end(UP, "up", "--config", config, "--workers", "2", *settings)
    assert done.returncode == 0, done.stderr
    return Ended(folder, json.loads(done.stdout.strip().splitlines()[-1]), seen)


@pytest.mark.timeout(300)
def test_one_command_trains_evaluates_and_leaves_nothing(ended: Ended) -> None:
    summary = ended.summary
    assert summary["rows_published"] == summary["rows_trained"] > 100
    assert summary["rows_lost"] == summary["rows_open"] == 0
    assert summary["tokens_per_second"] > 0
    assert 1.0 <= summary["acceptance_length_before"] <= 4.0
    assert 1.0 <= summary["acceptance_length_after"] <= 4.0
    steps = [drafter["step"] for drafter in summary["drafters"]]
    assert len(steps) == 2
    assert min(steps) > 0
    for instance in ("main-0", "main-1"):
        curve = losses(ended.run, instance)
        assert sum(curve[-3:]) < 0.85 * sum(curve[:3]), curve
    assert not segments_of(ended.folder)
    assert not list(ended.run.glob("*.sock"))


@pytest.mark.timeout(300)
def test_the_status_shows_what_each_target_has_checked_and_each_worker_does(ended: Ended) -> None:
    running = [status for status in ended.seen if len(status["workers"]) == 2]
    targets = running[-1]["target"]["instances"]
    assert len(targets) == 2
    for target in targets:
        checks = target["report"]["checks"]
        assert {"tokenizer", "mask_token", "tables", "embedding", "head", "packing"} <= set(checks)
        assert not any(text.startswith("warning") for text in checks.values()), checks
    assert any(
        all(w["report"] and w["report"]["step"] > 0 for w in status["workers"])
        for status in running
    )
    reports = [worker["report"] for worker in running[-1]["workers"]]
    assert all(0 < report["seconds_to_first_step"] < 300 for report in reports), reports
    log = (ended.run / "logs" / "worker-0.log").read_text()
    assert "first step " in log, log


@pytest.mark.timeout(300)
def test_the_rows_of_two_targets_add_up(ended: Ended) -> None:
    total = ended.summary["rows_published"]
    accounts = [
        json.loads((ended.run / f"{name}.summary.json").read_text())["groups"]["main"]
        for name in target_names(2)
    ]
    first, second = (account["rows_published"] for account in accounts)
    assert first + second == total
    assert first - second in (0, 1), "rows take turns"
    trained = [trainer_state(ended.run, worker)["trained_rows"] for worker in (0, 1)]
    assert sum(trained) == total
    both = [status for status in ended.seen if len(status["rings"]) == 2]
    assert both
    assert {ring["instance"] for ring in both[-1]["rings"]} == {"target-0", "target-1"}
    assert {status["target"]["total_rows"] for status in both} == {total}
    (group,) = both[-1]["groups"]
    published = sum(ring["groups"][0]["published"] for ring in both[-1]["rings"])
    assert group["account"]["published"] == published


@pytest.mark.timeout(200)
def test_a_killed_workers_rows_are_trained_by_the_other(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=400)
    logs = tmp_path / "run" / "logs"
    slow = ("--set", "training.checkpoint_steps=1000", "--set", "ring.num_slots=2")
    target = start("services.target_server", "--config", config, *slow, log=logs / "target.log")
    workers = [
        start("services.drafter_worker", "--config", config, *slow, log=logs / f"worker-{i}.log")
        for i in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        while len(list((tmp_path / "run" / "metrics").glob("*.jsonl"))) < 2 or any(
            not path.read_text() for path in (tmp_path / "run" / "metrics").glob("*.jsonl")
        ):
            assert time.monotonic() < deadline, (logs / "worker-0.log").read_text()
            workers[0].poll()
            time.sleep(0.05)
        workers[0].send_signal(signal.SIGKILL)
        assert workers[1].wait(100) == 0, (logs / "worker-1.log").read_text()
        assert target.wait(100) == 0, (logs / "target.log").read_text()
    finally:
        for process in (target, *workers):
            process.kill()
            process.wait()
    summary = json.loads((tmp_path / "run" / "target-0.summary.json").read_text())
    account = summary["groups"]["main"]
    assert account["rows_trained"] == account["rows_published"] > 100
    assert account["rows_lost"] == account["rows_open"] == account["rows_poison"] == 0
    assert account["recaptured"] > 0, "the dead worker had taken rows"
    assert not segments_of(tmp_path)


@pytest.mark.timeout(200)
def test_a_resumed_worker_goes_on_from_its_checkpoint_and_no_row_is_lost(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=400)
    logs = tmp_path / "run" / "logs"
    target = start("services.target_server", "--config", config, log=logs / "target.log")
    checkpoints = tmp_path / "run" / "checkpoints" / "main" / "0"
    try:
        first = start("services.drafter_worker", "--config", config, log=logs / "first.log")
        deadline = time.monotonic() + 100
        while not (checkpoints / "step-000020").exists():
            assert time.monotonic() < deadline, (logs / "first.log").read_text()
            time.sleep(0.02)
        first.kill()
        first.wait()
        second = start("services.drafter_worker", "--config", config, log=logs / "second.log")
        assert second.wait(100) == 0, (logs / "second.log").read_text()
        assert target.wait(100) == 0, (logs / "target.log").read_text()
    finally:
        target.kill()
        target.wait()
    summary = json.loads((tmp_path / "run" / "target-0.summary.json").read_text())
    account = summary["groups"]["main"]
    assert account["rows_trained"] == account["rows_published"]
    assert account["rows_lost"] == account["rows_open"] == 0
    worker = json.loads((tmp_path / "run" / "workers" / "main-0.summary.json").read_text())
    assert worker["trained_rows"] == account["rows_published"]
    assert (logs / "second.log").read_text().count("step-000000") == 0
