"""Whole runs through real processes: a random tiny target teaches a drafter."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.runs import make_run, run_to_end, segments_of, start, train, watched

UP = "services.launcher.cli"


def losses(run: Path, instance: str) -> list[float]:
    lines = (run / "metrics" / f"{instance}.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.timeout(300)
def test_one_command_trains_evaluates_and_leaves_nothing(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=400)
    with watched(tmp_path / "run") as seen:
        done = run_to_end(UP, "up", "--config", config, "--workers", "2")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["rows_published"] == summary["rows_trained"] > 100
    assert summary["rows_lost"] == 0
    assert summary["tokens_per_second"] > 0
    assert 1.0 <= summary["acceptance_length_before"] <= 4.0
    assert 1.0 <= summary["acceptance_length_after"] <= 4.0
    steps = [drafter["step"] for drafter in summary["drafters"]]
    assert len(steps) == 2
    assert min(steps) > 0
    for instance in ("main-0", "main-1"):
        curve = losses(tmp_path / "run", instance)
        assert sum(curve[-3:]) < 0.85 * sum(curve[:3]), curve
    running = [status for status in seen if len(status["workers"]) == 2]
    (target,) = running[-1]["target"]["instances"]
    checks = target["report"]["checks"]
    assert {"tokenizer", "mask_token", "tables", "embedding", "head", "packing"} <= set(checks)
    assert not any(text.startswith("warning") for text in checks.values()), checks
    assert any(
        all(w["report"] and w["report"]["step"] > 0 for w in status["workers"])
        for status in running
    )
    reports = [worker["report"] for worker in running[-1]["workers"]]
    assert all(0 < report["seconds_to_first_step"] < 300 for report in reports), reports
    log = (tmp_path / "run" / "logs" / "worker-0.log").read_text()
    assert "first step " in log, log
    assert not segments_of(tmp_path)


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


@pytest.mark.timeout(200)
def test_a_finished_run_started_again_has_nothing_to_do_and_ends_cleanly(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=60)
    (first,) = train(config)
    assert first["groups"]["main"]["rows_trained"] > 0
    done = run_to_end(UP, "up", "--config", config, "--set", "launcher.evaluate=false")
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout.splitlines()[-1])
    assert second["rows_published"] == second["rows_lost"] == 0


def test_ctrl_c_ends_a_run_cleanly(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=20_000)
    log = tmp_path / "launcher.log"
    run = start(UP, "up", "--config", config, log=log)
    metrics = tmp_path / "run" / "metrics" / "main-0.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        assert run.poll() is None, log.read_text()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    run.wait(60)
    assert not segments_of(tmp_path), log.read_text()
    assert "Traceback" not in log.read_text()
    steps = sorted((tmp_path / "run" / "checkpoints" / "main" / "0").glob("step-*"))
    assert steps[-1].name != "step-000000", "a clean stop makes its last steps durable"
    left = subprocess.run(["pgrep", "-f", str(config)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
