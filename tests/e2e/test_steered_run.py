"""What is done to a run under `ringdraft up` while it goes on, until Ctrl-C ends it: one run for all."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live_runs import PATIENCE_SECONDS, Live
from tests.rings import wait_until
from tests.runs import make_run, run_to_end, segments_of, start

CLI = "services.launcher.cli"

pytestmark = pytest.mark.timeout(500)


class Up(Live):
    """A run with two workers, an evaluator that follows, and rows for minutes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "run")
        self.directory = directory
        self.log = directory / "up.log"
        self.config = make_run(directory, num_conversations=20_000)
        # The follower would take a core from the others if there were a checkpoint to score at any time.
        settings = ("--set", "launcher.follow=true", "--set", "training.checkpoint_steps=500")
        self.process = start(
            CLI, "up", "--config", self.config, "--workers", "2", *settings, log=self.log
        )

    def log_has(self, name: str, text: str) -> bool:
        logs = (self.run / "logs").glob(f"{name}*.log")
        return any(text in log.read_text() for log in logs)

    def close(self) -> None:
        super().close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(90)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("live"))
    try:
        up.wait(lambda s: {"main-0", "main-1"} <= stepping(s), "both workers train")
        yield up
    finally:
        up.close()


def worker(status: dict[str, Any], name: str) -> dict[str, Any]:
    views = [view for view in status["workers"] if view["instance"] == name and view["report"]]
    return views[0] if views else {"condition": "absent", "report": {"step": 0}, "exit_code": None}


def stepping(status: dict[str, Any]) -> set[str]:
    """Return the live workers that have stepped."""
    names = {view["instance"] for view in status["workers"]}
    views = {name: worker(status, name) for name in names}
    return {n for n, view in views.items() if view["condition"] == "ok" and view["report"]["step"]}


def test_a_live_run_gets_another_worker_and_loses_it_again(up: Up) -> None:
    done = run_to_end(CLI, "scale", "3", "--run", up.run)
    assert done.returncode == 0, done.stderr
    up.wait(lambda s: stepping(s) == {"main-0", "main-1", "main-2"}, "three workers step")
    assert run_to_end(CLI, "scale", "2", "--run", up.run).returncode == 0
    up.wait(lambda s: stepping(s) == {"main-0", "main-1"}, "two workers are left")
    assert up.process.poll() is None
    log = (up.run / "logs" / "worker-2.log").read_text()
    assert "checkpoint" in log, "it leaves with its rows in a checkpoint"
    for arguments, said in (
        (("0",), "expected 1 to 64 workers"),
        (("2", "--group", "wide"), "expected one of main"),
    ):
        refused = run_to_end(CLI, "scale", *arguments, "--run", up.run)
        assert refused.returncode == 2
        assert said in refused.stderr


def test_routes_reach_what_they_name_and_the_run_goes_on(up: Up) -> None:
    up.post("/services/main-0/stacks")
    wait_until(lambda: up.log_has("worker", "most recent call first"), "main-0 writes its stacks")
    up.post("/workers/main-1/drain")
    up.wait(lambda s: worker(s, "main-1")["condition"] == "ended", "main-1 has ended")
    status = up.status()
    assert status is not None
    assert worker(status, "main-1")["exit_code"] == 0
    step = worker(status, "main-0")["report"]["step"]
    up.wait(lambda s: worker(s, "main-0")["report"]["step"] > step, "main-0 trains on")
    up.wait(lambda s: s["evaluators"], "the evaluator follows")
    up.post("/evaluations")
    wait_until(
        lambda: up.log_has("evaluator", "asked for the newest checkpoints"),
        "it looks for the newest checkpoint", PATIENCE_SECONDS,
    )  # fmt: skip
    shown = subprocess.run(
        [sys.executable, "-m", CLI, "top", "--once", "--run", str(up.run)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert re.search(r"main-0 +(running|measuring|saving)", shown), shown
    assert up.process.poll() is None


def test_ctrl_c_ends_a_run_cleanly(up: Up) -> None:
    metrics = up.run / "metrics" / "main-0.jsonl"
    wait_until(lambda: metrics.exists() and bool(metrics.read_text()), "figures are written")
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0, up.log.read_text()
    assert not segments_of(up.directory), up.log.read_text()
    assert "Traceback" not in up.log.read_text()
    steps = sorted((up.run / "checkpoints" / "main" / "0").glob("step-*"))
    assert int(steps[-1].name[5:]) >= last > 0, "a clean stop makes its last steps durable"
    found = subprocess.run(
        ["pgrep", "-f", str(up.config)], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_to_end(CLI, "scale", "2", "--run", tmp_path)
    assert done.returncode == 2
    assert "is not running" in done.stderr
