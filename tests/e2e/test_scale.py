"""`ringdraft scale` starts and stops workers of a live run; what cannot be is named."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.rings import wait_until
from tests.runs import Process, make_run, run_to_end, start

CLI = "services.launcher.cli"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, Process]]:
    """A run under `ringdraft up` that has rows for minutes."""
    config = make_run(tmp_path, num_conversations=4000)
    log = tmp_path / "up.log"
    up = start(CLI, "up", "--config", config, "--set", "launcher.evaluate=false", log=log)
    yield tmp_path / "run", up
    if up.poll() is None:
        run_to_end(CLI, "stop", "--run", tmp_path / "run")
    up.wait(60)


def live_workers(run: Path) -> int:
    try:
        url = json.loads((run / "control.json").read_text())["url"]
        status = httpx.get(f"{url}/status", timeout=5).json()
    except (OSError, ValueError, httpx.HTTPError):
        return 0
    working = [
        w for w in status["workers"] if w["condition"] == "ok" and (w["report"] or {}).get("step")
    ]
    return len(working)


@pytest.mark.timeout(240)
def test_a_live_run_gets_another_worker_and_loses_it_again(live: tuple[Path, Process]) -> None:
    run, up = live
    wait_until(lambda: live_workers(run) == 1, "one worker steps", 100)
    done = run_to_end(CLI, "scale", "2", "--run", run)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: live_workers(run) == 2, "two workers step", 100)
    assert run_to_end(CLI, "scale", "1", "--run", run).returncode == 0
    wait_until(lambda: live_workers(run) == 1, "one worker is left", 100)
    assert up.poll() is None
    log = (run / "logs" / "worker-1.log").read_text()
    assert "checkpoint" in log, "it leaves with its rows in a checkpoint"
    for arguments, said in (
        (("0",), "expected 1 to 64 workers"),
        (("2", "--group", "wide"), "expected one of main"),
    ):
        refused = run_to_end(CLI, "scale", *arguments, "--run", run)
        assert refused.returncode == 2
        assert said in refused.stderr


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run_to_end(CLI, "scale", "2", "--run", tmp_path)
    assert done.returncode == 2
    assert "is not running" in done.stderr
