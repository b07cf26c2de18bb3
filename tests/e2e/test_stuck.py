"""A service that hangs is ended and started again, where the launcher is told how long to wait."""

import json
import os
import signal
from pathlib import Path

import pytest

from services.launcher.progress import fetch_status
from tests.rings import wait_until
from tests.runs import make_run, segments_of, start, watched

CLI = "services.launcher.cli"


@pytest.mark.timeout(240)
def test_a_worker_that_hangs_is_killed_started_again_and_trains_the_rest(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=300)
    log, run = tmp_path / "up.log", tmp_path / "run"
    settings = (
        "launcher.stuck_seconds=4", "launcher.restart='on-failure'", "launcher.evaluate=false",
        "launcher.restart_delay_seconds=0",
    )  # fmt: skip
    options = [part for setting in settings for part in ("--set", setting)]
    up = start(CLI, "up", "--config", config, *options, log=log)
    try:
        wait_until(lambda: has_begun(run) or up.poll() is not None, "the worker trains", 100)
        assert has_begun(run), log.read_text()
        os.kill(pid_of("worker-0", log), signal.SIGSTOP)
        with watched(run) as seen:
            assert up.wait(200) == 0, log.read_text()
    finally:
        up.kill()
        up.wait()
    said = log.read_text()
    assert "is silent: no heartbeat" in said
    assert "it is killed" in said
    assert "restart 1 of 3" in said
    line = json.loads(said.splitlines()[-1])
    assert line["rows_trained"] == line["rows_published"] > 30
    assert not segments_of(tmp_path)
    trained = [group["trained_rows"] for status in seen for group in status["groups"]]
    assert trained == sorted(trained), "never less than before"
    assert len(set(trained)) > 1


def has_begun(run: Path) -> bool:
    """Whether the control plane has heard of the worker's first step."""
    workers = (fetch_status(run) or {"workers": []})["workers"]
    return any((each["report"] or {}).get("seconds_to_first_step") for each in workers)


def pid_of(name: str, log: Path) -> int:
    """Return the pid of a service's last start, as the launcher says it."""
    (*_, found) = (line for line in log.read_text().splitlines() if f"started {name} (pid " in line)
    return int(found.partition("(pid ")[2].partition(")")[0])
