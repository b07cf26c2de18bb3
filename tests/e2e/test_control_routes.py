"""What the control plane's routes do to a real run: one worker drained, stacks, an evaluation."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rings import wait_until
from tests.runs import make_run, segments_of, start

UP = "services.launcher.cli"
PATIENCE_SECONDS = 150.0


class Live:
    """A run under `ringdraft up`, through its control plane."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._http = httpx.Client(timeout=30)

    def status(self) -> dict[str, Any] | None:
        try:
            return self._http.get(f"{self._url}/status").raise_for_status().json()
        except (OSError, httpx.HTTPError):
            return None

    def post(self, path: str) -> None:
        token = (self.run / "control.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        assert self._http.post(f"{self._url}{path}", headers=headers).status_code == 202

    def wait(self, holds: Callable[[dict[str, Any]], Any], what: str) -> None:
        def is_so() -> bool:
            status = self.status()
            return status is not None and bool(holds(status))

        wait_until(is_so, what, PATIENCE_SECONDS)

    def log_has(self, name: str, text: str) -> bool:
        logs = (self.run / "logs").glob(f"{name}*.log")
        return any(text in log.read_text() for log in logs)

    def close(self) -> None:
        self._http.close()

    @property
    def _url(self) -> str:
        return json.loads((self.run / "control.json").read_text())["url"]


def worker(status: dict[str, Any], name: str) -> dict[str, Any]:
    views = [view for view in status["workers"] if view["instance"] == name and view["report"]]
    return views[0] if views else {"condition": "absent", "report": {"step": 0}, "exit_code": None}


@pytest.mark.timeout(500)
def test_routes_reach_what_they_name_and_the_run_goes_on(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=6000)
    follow = ("--workers", "2", "--set", "launcher.follow=true")
    up = start(UP, "up", "--config", config, *follow, log=tmp_path / "up.log")
    live = Live(tmp_path / "run")
    try:
        live.wait(lambda s: worker(s, "main-1")["report"]["step"] > 2, "both workers train")
        live.post("/services/main-0/stacks")
        wait_until(
            lambda: live.log_has("worker", "most recent call first"), "main-0 writes its stacks"
        )
        live.post("/workers/main-1/drain")
        live.wait(lambda s: worker(s, "main-1")["condition"] == "ended", "main-1 has ended")
        status = live.status()
        assert worker(status, "main-1")["exit_code"] == 0
        step = worker(status, "main-0")["report"]["step"]
        live.wait(lambda s: worker(s, "main-0")["report"]["step"] > step, "main-0 trains on")
        live.wait(lambda s: s["evaluators"], "the evaluator follows")
        live.post("/evaluations")
        wait_until(
            lambda: live.log_has("evaluator", "asked for the newest checkpoints"),
            "it looks for the newest checkpoint", PATIENCE_SECONDS,
        )  # fmt: skip
        shown = subprocess.run(
            [sys.executable, "-m", UP, "top", "--once", "--run", str(live.run)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert re.search(r"main-0 +(running|measuring|saving)", shown), shown
        assert up.poll() is None
    finally:
        live.close()
        up.send_signal(signal.SIGTERM)
        code = up.wait(90)
    assert code == 0, (tmp_path / "up.log").read_text()
    assert not segments_of(tmp_path)
