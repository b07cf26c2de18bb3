"""The processes of one fault test: started, killed, stopped, and called to account at the end.

Processes are forked from one that has imported what they need, so that a start costs milliseconds.
"""

import contextlib
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.forks import FORKS
from tests.ring_programs import Plan, read_checkpoint, read_log, run_program
from tests.rings import endpoint_in, wait_until

ROWS = 24
QUICK = {
    "lease_seconds": 0.4, "lease_max_seconds": 0.8, "session_timeout_seconds": 0.8,
    "resume_wait_seconds": 0.4, "max_attempts": 20,
}  # fmt: skip
PATIENT = QUICK | {
    "lease_seconds": 60.0, "lease_max_seconds": 60.0, "session_timeout_seconds": 60.0,
}  # fmt: skip
END_SECONDS = 90.0


@dataclass
class Scene:
    """The processes of one test, by name, and what they have written down."""

    folder: Path
    shared_memory: Path
    processes: list[BaseProcess] = field(default_factory=list)
    names: dict[str, BaseProcess] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)
    """Names of workers, and their groups."""

    def start(self, kind: str, name: str, **plan: Any) -> None:
        plan.setdefault("table", QUICK)
        places = str(self.folder), str(plan.pop("shared_memory", self.shared_memory))
        process = FORKS.Process(target=run_program, args=(kind, Plan(*places, name, **plan)))
        process.start()
        self.processes.append(process)
        self.names[name] = process
        if kind == "worker":
            self.workers[name] = plan.get("group", "main")

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Signal the process of a name; say whether it was there."""
        process = self.names[name]
        assert process.pid is not None
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return False
        if number == signal.SIGKILL:
            process.join(END_SECONDS)
            assert process.exitcode is not None, f"{name} survives SIGKILL"
        return True

    def go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def log(self, name: str, event: str, pid: int | None = None) -> list[dict[str, Any]]:
        entries = [entry for entry in read_log(self.folder, name) if entry["event"] == event]
        return [entry for entry in entries if pid in (None, entry["pid"])]

    def errors(self, name: str) -> str:
        path = self.folder / f"{name}.err"
        return path.read_text() if path.exists() else ""

    def wait_for(self, name: str, event: str, count: int = 1) -> None:
        """Wait until the living process of a name has written an event so many times."""
        process = self.names[name]

        def has_come() -> bool:
            done = len(self.log(name, event, process.pid)) >= count
            assert done or not process.exitcode, f"{name}: {self.errors(name)}"
            return done

        wait_until(has_come, f"{name}: {count} {event}")

    def wait_for_end(self, *names: str) -> None:
        """Wait until processes end by themselves, cleanly."""
        for name in names:
            assert self.wait_for_exit(name) == 0, f"{name}: {self.errors(name)}"

    def wait_for_exit(self, name: str) -> int:
        """Wait until a process ends, and return its exit code."""
        process = self.names[name]
        process.join(END_SECONDS)
        assert process.exitcode is not None, f"{name} does not end: {self.errors(name)}"
        return process.exitcode

    def trained(self, *names: str) -> Counter[int]:
        """Count each row in the weights that survive: the workers' checkpoints."""
        names = names or tuple(self.workers)
        return Counter(row for name in names for row in read_checkpoint(self.folder, name)[0])

    def deliveries(self, sequence: int, group: str = "main") -> set[tuple[int, ...]]:
        """Return each (ring_epoch, slot, generation, attempt) under which a group leased a row."""
        leased = [entry for name in self.workers_of(group) for entry in self.log(name, "leased")]
        return {tuple(entry["delivery"]) for entry in leased if entry["sequence"] == sequence}

    def report(self, name: str = "owner") -> dict[str, Any]:
        return self.log(name, "done")[-1]["report"]

    def account(self, group: str = "main") -> dict[str, int]:
        return next(account for account in self.report()["groups"] if account["group"] == group)

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.shared_memory.iterdir())

    def maps(self, name: str) -> str:
        return Path(f"/proc/{self.names[name].pid}/maps").read_text()

    def assert_nothing_is_lost(self, num_rows: int = ROWS) -> None:
        """Each row is trained, none was given up, and all slots are free."""
        self.assert_accounts_hold("main", num_rows)
        assert self.given_up("main") == 0
        slots = self.report()["slots"]
        assert slots == {"free": sum(slots.values()), "writing": 0, "published": 0}

    def given_up(self, group: str) -> int:
        """Return how many rows of a group any of the owners counted as poison or skipped."""
        entries = self.log("owner", "poison") + self.log("owner", "skipped")
        return sum(entry["group"] == group for entry in entries)

    def assert_accounts_hold(self, group: str, num_rows: int) -> None:
        """Each row is trained at least once or given up, and at most 1 + its requeues times.

        A requeue, a capture for a lost row, and a capture after an owner's restart each make a
        delivery of their own.
        """
        account, trained = self.account(group), self.trained(*self.workers_of(group))
        untrained = set(range(num_rows)) - set(trained)
        assert len(untrained) <= self.given_up(group), f"lost: {sorted(untrained)}"
        assert set(trained) <= set(range(num_rows))
        for sequence, count in trained.items():
            deliveries = self.deliveries(sequence, group)
            assert count <= len(deliveries), f"row {sequence}: trained {count} times"
        ended = account["released"] + account["poison"] + account["skipped"]
        assert (account["open"], account["in_ring"], account["published"]) == (0, 0, ended)
        settled = account["committed"] + account["poison"] + account["skipped"]
        assert account["published"] - account["recaptured"] == settled

    def workers_of(self, group: str) -> list[str]:
        return [name for name, its_group in self.workers.items() if its_group == group]


@contextlib.contextmanager
def make_scene() -> Iterator[Scene]:
    """Give a test a run of its own; end its processes by their ids; nothing may be left."""
    with (
        tempfile.TemporaryDirectory(prefix="rd-") as folder,
        tempfile.TemporaryDirectory(prefix="rd-test-", dir="/dev/shm") as shared_memory,
    ):
        scene = Scene(Path(folder), Path(shared_memory))
        running = []
        try:
            yield scene
            running = [process.pid for process in scene.processes if process.is_alive()]
        finally:
            for process in scene.processes:
                process.kill()
                process.join(END_SECONDS)
        assert running == [], "processes that the test did not see end"
        left = [p.pid for p in scene.processes if Path(f"/proc/{p.pid}").exists()]
        assert left == [], "in the process table"
        assert scene.segments() == []
        assert not endpoint_in(scene.folder).exists()
