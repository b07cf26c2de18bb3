"""What `ringdraft up` says of services that are overdue."""

from pathlib import Path
from typing import Any

import pytest

from services.control_plane.registry import Registry
from services.control_plane.view import build_status
from services.launcher.progress import ProgressView, StatusFeed
from tests.heartbeats import RUN, beat, target_report, worker_report


class Run:
    """A registry's run as the launcher sees it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.registry = Registry(RUN, 0.5, lambda: self.now)
        self.feed = StatusFeed(Path("runs/demo"))
        self.view = ProgressView(self.feed)
        self.number = 0

    def pass_time(self, seconds: float, *, progress: int, is_silent: bool = False) -> None:
        self.now += seconds
        self.number += 1
        self.registry.take_heartbeat(beat("target_server", 1, self.number, report=target_report()))
        if not is_silent:
            worker = beat(
                "drafter_worker", 2, self.number, progress=progress, report=worker_report()
            )
            self.registry.take_heartbeat(worker)
        status: dict[str, Any] = build_status(
            self.registry.snapshot(), RUN, "runs/demo"
        ).model_dump(mode="json")
        self.feed.latest = status
        self.view.update()


def test_a_stalled_worker_is_named_once_and_so_is_its_recovery(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run()
    run.pass_time(0, progress=7)
    for _ in range(4):
        run.pass_time(100, progress=7)
    run.pass_time(1, progress=8)
    text = capsys.readouterr().err
    line = "worker-0 (pid 100, step 7) is stalled: no progress in phase running for 200 s"
    assert text.count("is stalled") == 1
    assert line in text
    assert "ringdraft stacks worker-0 --run runs/demo" in text
    assert "worker-0 (pid 100) is no longer stalled" in text


def test_a_short_silence_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.pass_time(0, progress=7)
    run.pass_time(5, progress=7, is_silent=True)
    assert "silent" not in capsys.readouterr().err
    run.pass_time(6, progress=7, is_silent=True)
    assert "worker-0 (pid 100, step 7) is silent: no heartbeat for 11 s" in capsys.readouterr().err
