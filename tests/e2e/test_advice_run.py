"""The hint of a real run, held against what happens when it is followed.

Workers are stopped for most of the time, as if their GPU were slow, so that cores are no limit here.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live_runs import Live
from tests.rings import wait_until
from tests.runs import Process, make_run, run_to_end, start

CLI = "services.launcher.cli"
TURN_SECONDS = 0.1
NUM_TURNS = 5
MEASURED_SECONDS = 6.0


class Throttle:
    """Lets each worker run for a fifth of the time, one at a time."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pids: list[int] = []
        while not self._ended.is_set():
            pids = self._pids()
            send(signal.SIGSTOP, pids)
            for turn in range(NUM_TURNS):
                its = pids[turn : turn + 1]
                send(signal.SIGCONT, its)
                self._ended.wait(TURN_SECONDS)
                send(signal.SIGSTOP, its)
        send(signal.SIGCONT, pids)


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Run:
    """A run under `ringdraft up` that has rows for minutes."""

    def __init__(self, directory: Path) -> None:
        config = make_run(directory, num_conversations=4000)
        self.directory = directory / "run"
        self._live = Live(self.directory)
        self.process: Process = start(
            CLI, "up", "--config", config, "--set", "launcher.evaluate=false",
            log=directory / "up.log",
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        return self._live.status() or {}

    def pids(self) -> list[int]:
        """Return the pids of workers that have stepped."""
        return [
            worker["pid"] for worker in self.status().get("workers", [])
            if (worker["report"] or {}).get("step") and worker["exit_code"] is None
        ]  # fmt: skip

    def close(self) -> None:
        """Stop it, if it has not ended."""
        self._live.close()
        if self.process.poll() is None:
            run_to_end(CLI, "stop", "--run", self.directory)
        self.process.wait(60)

    def rate(self) -> float:
        """Return the tokens a second that are trained in the next seconds."""
        tokens, began_at = self.status()["groups"][0]["trained_tokens"], time.monotonic()
        time.sleep(MEASURED_SECONDS)
        more = self.status()["groups"][0]["trained_tokens"] - tokens
        return more / (time.monotonic() - began_at)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.mark.hammer  # it compares rates, which other load on the machine changes
@pytest.mark.timeout(400)
def test_another_worker_gives_what_the_hint_says(run: Run) -> None:
    wait_until(lambda: len(run.pids()) == 1, "one worker steps", 120)
    throttle = Throttle(run.pids)
    try:

        def is_held_up() -> bool:
            bottleneck = run.status()["bottleneck"]
            blocked, advice = bottleneck["blocked_share"], bottleneck["advice"]
            return bottleneck["name"] == "drafter" and blocked > 0.5 and advice is not None

        wait_until(is_held_up, "the worker holds the run up", 120)
        before = run.rate()
        advice = run.status()["bottleneck"]["advice"]
        expected = advice["with_another_worker"] / advice["tokens_per_second"]
        assert "another worker in group 'main'" in advice["text"]
        assert "It needs cores of its own" in advice["text"]
        assert expected == pytest.approx(2, rel=0.2)
        assert run_to_end(CLI, "scale", "2", "--run", run.directory).returncode == 0
        wait_until(lambda: len(run.pids()) == 2, "two workers step", 120)
        gain = run.rate() / before
        print(f"expected {expected:.2f} times as much, got {gain:.2f} times")
        assert gain > 1.25
    finally:
        throttle.end()
