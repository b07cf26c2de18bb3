"""Runs whose workers form one synced group, process by process, for tests that disturb them."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs import END_SECONDS, Process, make_run, segments_of, start

QUICK = {
    "sync_lease_seconds": 1.0,
    "sync_wait_seconds": 0.3,
    "sync_patience_seconds": 20.0,
    "sync_transfer_seconds": 3.0,
    "sync_steps": 3,
}
WATCHDOG_SECONDS = 100.0


class GroupRun:
    """A quorum server, a target and workers of the group `main`. Use as a context manager."""

    def __init__(self, directory: Path, sync: str, num_conversations: int = 120) -> None:
        self.config = make_run(directory, num_conversations)
        self.directory = directory / "run"
        group = {**QUICK, "sync": sync}
        self._settings = [f"groups.main.{key}={value}" for key, value in group.items()]
        # Each row takes a while and is one step, so that a test has time to disturb it.
        self._settings += [
            "training.visits=4", "training.accumulation=4", "run.log_level=DEBUG",
        ]  # fmt: skip
        self.processes: dict[str, Process] = {}
        self._logs: dict[str, list[Path]] = {}

    def __enter__(self) -> "GroupRun":
        self.start("services.quorum_server", "quorum")
        self.start("services.target_server", "target")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(60)

    def start(self, module: str, name: str, *settings: str) -> None:
        """Start a service, again under a name that has ended."""
        logs = self._logs.setdefault(name, [])
        logs.append(self.directory / "logs" / f"{name}.{len(logs)}.log")
        given = [part for one in (*self._settings, *settings) for part in ("--set", one)]
        self.processes[name] = start(module, "--config", self.config, *given, log=logs[-1])

    def start_workers(self, *names: str, settings: tuple[str, ...] = ()) -> None:
        """Start workers."""
        for name in names:
            self.start("services.drafter_worker", name, *settings)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a process; after SIGKILL it is gone when this returns."""
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(60)

    def log(self, name: str) -> str:
        """Return everything that a name has written, in all its lives."""
        return "".join(path.read_text() for path in self._logs.get(name, []) if path.exists())

    def weights(self, name: str) -> list[dict[str, Any]]:
        """Return which weights a worker has had, after each exchange and each healing."""
        lines = [line.partition(": weights ")[2] for line in self.log(name).splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def trained(self, name: str) -> set[int]:
        """Return the rows that a worker has brought to exchanges."""
        return {row for entry in self.weights(name) for row in entry["rows"]}

    def contained(self) -> set[int]:
        """Return the rows that the group's newest checkpoint lists."""
        consumed = self.state()["consumed"]
        return {*range(consumed["low"]), *consumed["above"]}

    def num_exchanges(self, name: str) -> int:
        """Return how many exchanges a worker has made."""
        return len(self.weights(name))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fail with the logs where it does not come."""
        never, deadline = threading.Event(), time.monotonic() + WATCHDOG_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.tails()}"
            never.wait(0.05)

    def wait_for_exchanges(self, name: str, count: int) -> None:
        """Wait until a worker has made so many more exchanges."""
        wanted = self.num_exchanges(name) + count
        self.wait_until(lambda: self.num_exchanges(name) >= wanted, f"{name}: {wanted} exchanges")

    def wait_for_end(self, *names: str) -> None:
        """Wait for processes that end well."""
        for name in names:
            assert self.processes[name].wait(END_SECONDS) == 0, f"{name}\n{self.tails()}"

    def tails(self) -> str:
        """Return the end of each log."""
        return "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in self._logs)

    def state(self) -> dict[str, Any]:
        """Return the trainer's state in the group's newest checkpoint."""
        steps = sorted((self.directory / "checkpoints" / "main" / "0").glob("step-*"))
        return dict(json.loads((steps[-1] / "trainer" / "state.json").read_text()))

    def num_saved(self, names: str) -> int:
        """Return how many checkpoints these have written."""
        return sum(self.log(name).count(": checkpoint /") for name in names)

    def account(self) -> dict[str, Any]:
        """Return the target's account of the group."""
        summary = json.loads((self.directory / "target-0.summary.json").read_text())
        return dict(summary["groups"]["main"])

    def assert_whole(self, *workers: str) -> None:
        """The target has ended: weights are equal, and every row is in them, as often as made."""
        self.wait_for_end("target")
        digests: dict[int, set[str]] = {}
        for name in workers:
            for entry in self.weights(name):
                digests.setdefault(entry["lineage"], set()).add(entry["digest"])
        assert {len(found) for found in digests.values()} == {1}, "weights of one lineage differ"
        account, state = self.account(), self.state()
        total = account["rows_published"]
        assert total > 30
        assert (account["rows_trained"], account["rows_lost"]) == (total, 0), account
        assert state["consumed"] == {"low": total, "above": []}, (state, account)
        made_again = account["requeued"] + account["recaptured"]
        assert total <= state["trained_rows"] <= total + made_again, (state, account)
        assert not segments_of(self.config.parent)
