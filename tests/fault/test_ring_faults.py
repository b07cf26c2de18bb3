"""Processes that are killed and stopped: what they held comes back, and nothing is left behind."""

import contextlib
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.contracts.sequences import SequenceSet
from tests.ring_programs import Plan, arguments, read_checkpoint, read_log
from tests.rings import endpoint_in, wait_until

ROOT = Path(__file__).parents[2]
ROWS = 24
QUICK = {
    "lease_seconds": 0.4, "lease_max_seconds": 0.8, "session_timeout_seconds": 0.8,
    "resume_wait_seconds": 0.4, "max_attempts": 20,
}  # fmt: skip


@dataclass
class Scene:
    """The processes of one test, by name, and what they have written down."""

    folder: Path
    shared_memory: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    names: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, kind: str, name: str, **plan: Any) -> None:
        plan.setdefault("table", QUICK)
        places = str(self.folder), str(self.shared_memory)
        command = arguments(kind, Plan(*places, name, **plan))
        with (self.folder / f"{name}.err").open("ab") as errors:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=errors)
        self.processes.append(process)
        self.names[name] = process

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self.names[name]
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait(60)

    def go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def log(self, name: str, event: str, pid: int | None = None) -> list[dict[str, Any]]:
        entries = [entry for entry in read_log(self.folder, name) if entry["event"] == event]
        return [entry for entry in entries if pid in (None, entry["pid"])]

    def wait_for(self, name: str, event: str, count: int = 1) -> None:
        pid = self.names[name].pid
        wait_until(lambda: len(self.log(name, event, pid)) >= count, f"{name}: {count} {event}")

    def wait_for_end(self, *names: str) -> None:
        """Wait until processes end by themselves, cleanly."""
        for name in names:
            assert self.names[name].wait(60) == 0, (self.folder / f"{name}.err").read_text()

    def trained(self, *names: str) -> Counter[int]:
        """Count each row in the weights that survive: the workers' checkpoints."""
        return Counter(row for name in names for row in read_checkpoint(self.folder, name)[0])

    def report(self, name: str = "owner") -> dict[str, Any]:
        return self.log(name, "done")[-1]["report"]

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.shared_memory.iterdir())

    def maps(self, name: str) -> str:
        return Path(f"/proc/{self.names[name].pid}/maps").read_text()

    def assert_nothing_is_lost(self, *names: str, num_rows: int = ROWS, restarts: int = 0) -> None:
        """Each row is trained at least once and at most 1 + its requeues; the ring is empty."""
        report, trained = self.report(), self.trained(*names)
        (account,) = report["groups"]
        assert sorted(trained) == list(range(num_rows))
        assert max(trained.values()) <= 1 + account["requeued"] + account["recaptured"] + restarts
        assert account["published"] == account["released"] + account["poison"]
        assert (account["poison"], account["open"], account["in_ring"]) == (0, 0, 0)
        assert report["slots"] == {"free": 4, "writing": 0, "published": 0}


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Give the test a run of its own; end its processes by their ids; nothing may be left."""
    with (
        tempfile.TemporaryDirectory(prefix="rd-") as folder,
        tempfile.TemporaryDirectory(prefix="rd-test-", dir="/dev/shm") as shared_memory,
    ):
        scene = Scene(Path(folder), Path(shared_memory))
        yield scene
        running = [process for process in scene.processes if process.poll() is None]
        for process in scene.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(60)
            assert process.stdin is not None
            process.stdin.close()
        assert [process.args for process in running] == []
        assert scene.segments() == []
        assert not endpoint_in(scene.folder).exists()


def test_rows_of_a_killed_worker_are_trained_by_the_other(scene: Scene) -> None:
    """It dies in a copy, with rows that are trained and not committed."""
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "doomed", commit_every=3, hold_at=5)
    scene.wait_for("doomed", "holding")
    scene.start("worker", "other")
    scene.wait_for("other", "trained")
    scene.signal("doomed", signal.SIGKILL)
    scene.wait_for_end("owner", "other")
    scene.assert_nothing_is_lost("doomed", "other")
    durable = scene.trained("doomed")
    assert len(durable) == 3
    lost = {entry["sequence"] for entry in scene.log("doomed", "trained")} - set(durable)
    held = {entry["sequence"] for entry in scene.log("doomed", "holding")}
    assert len(lost) == 2
    assert lost | held <= set(scene.trained("other"))
    (account,) = scene.report()["groups"]
    assert account["recaptured"] == 2
    assert account["requeued"] >= 1


def test_a_killed_worker_that_comes_back_trains_nothing_that_it_had_committed(scene: Scene) -> None:
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "worker", commit_every=3, hold_at=8)
    scene.wait_for("worker", "holding")
    scene.signal("worker", signal.SIGKILL)
    durable = scene.trained("worker")
    scene.start("worker", "worker", commit_every=3)
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost("worker")
    assert all(scene.trained("worker")[row] == 1 for row in durable)
    assert len(durable) == 6


def test_a_stopped_worker_is_fenced_and_goes_on_in_a_fresh_session(scene: Scene) -> None:
    """It is stopped in a copy, past its lease and its session, while its slot is written again."""
    rows = 60
    scene.start("owner", "owner", num_rows=rows, row_seconds=0.05)
    scene.start("worker", "stopped", hold_at=4, capacity=1)
    scene.wait_for("stopped", "holding")
    scene.signal("stopped", signal.SIGSTOP)
    scene.start("worker", "other", commit_every=2)
    scene.wait_for("other", "trained", 16)
    scene.go("stopped")
    scene.signal("stopped", signal.SIGCONT)
    scene.wait_for_end("owner", "other", "stopped")
    scene.assert_nothing_is_lost("stopped", "other", num_rows=rows)
    held = scene.log("stopped", "holding")[0]["sequence"]
    assert [entry["sequence"] for entry in scene.log("stopped", "torn")] == [held]
    assert held in scene.trained("other")
    assert scene.report()["reclaimed"]["expired"] >= 1
    assert scene.report()["stale_calls"]["heartbeat"] >= 1
    assert "begin a fresh one" in (scene.folder / "stopped.err").read_text()


def test_workers_go_on_with_the_successor_of_a_killed_owner(scene: Scene) -> None:
    rows = 40
    for name in ("one", "two"):
        scene.start("worker", name, commit_every=3)
        scene.wait_for(name, "started")
    scene.start("owner", "owner", num_rows=rows, row_seconds=0.05)
    for name in ("one", "two"):
        scene.wait_for(name, "saved")
    scene.signal("owner", signal.SIGKILL)
    (dead,) = scene.segments()
    assert dead in scene.maps("one")
    first = {entry["sequence"] for entry in scene.log("owner", "publishing")}
    assert len(first) < rows
    scene.start("owner", "owner", num_rows=rows)
    scene.wait_for("owner", "ready")
    assert scene.log("owner", "reclaimed")[-1]["num_bytes"] > 0
    assert dead not in scene.segments()
    wait_until(lambda: dead not in scene.maps("one"), "the dead ring's memory is let go")
    scene.wait_for_end("owner", "one", "two")
    scene.assert_nothing_is_lost("one", "two", num_rows=rows, restarts=1)
    settled = SequenceSet.model_validate(scene.log("owner", "ready")[-1]["settled"], strict=False)
    pid = scene.names["owner"].pid
    again = {entry["sequence"] for entry in scene.log("owner", "publishing", pid)}
    assert not [sequence for sequence in again if sequence in settled]
    # What live workers had trained or staged beyond their checkpoints is not made again (R8).
    assert len(first & again) <= 2 * 2 + 4


def test_a_row_whose_writer_was_killed_is_written_by_its_successor(scene: Scene) -> None:
    scene.start("worker", "worker")
    scene.start("owner", "owner", num_rows=ROWS, hold_at=6)
    scene.wait_for("owner", "writing")
    scene.wait_for("worker", "trained", 6)
    scene.signal("owner", signal.SIGKILL)
    scene.start("owner", "owner", num_rows=ROWS)
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost("worker", restarts=1)
    assert scene.trained("worker")[6] == 1


def test_a_run_whose_processes_were_all_killed_starts_clean(scene: Scene) -> None:
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "one", commit_every=3, hold_at=6)
    scene.start("worker", "two", commit_every=3, hold_at=5)
    for name in ("one", "two"):
        scene.wait_for(name, "holding")
    for name in ("one", "owner", "two"):
        scene.signal(name, signal.SIGKILL)
    assert len(scene.segments()) == 1
    durable = scene.trained("one", "two")
    for name in ("one", "owner", "two"):
        scene.start("owner" if name == "owner" else "worker", name, num_rows=ROWS)
    scene.wait_for_end("owner", "one", "two")
    scene.assert_nothing_is_lost("one", "two")
    assert all(scene.trained("one", "two")[row] == 1 for row in durable)
    assert scene.log("owner", "reclaimed")[-1]["num_bytes"] > 0


def test_an_owner_that_was_stopped_blames_no_worker(scene: Scene) -> None:
    patient = QUICK | {
        "lease_seconds": 1.2,
        "lease_max_seconds": 60.0,
        "session_timeout_seconds": 1.2,
    }
    scene.start("owner", "owner", num_rows=ROWS, row_seconds=0.02, table=patient)
    scene.start("worker", "worker", hold_at=6)
    scene.wait_for("worker", "holding")
    scene.signal("owner", signal.SIGSTOP)
    time.sleep(3.0)
    scene.signal("owner", signal.SIGCONT)
    scene.go("worker")
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost("worker")
    assert scene.report()["reclaimed"] == {}
    assert scene.report()["stale_calls"] == {"held": 0}
    assert set(scene.trained("worker").values()) == {1}


def test_a_goodbye_arrives_even_if_its_process_ends_at_once(scene: Scene) -> None:
    """Without it the owner would stay until the session times out."""
    patient = QUICK | {"session_timeout_seconds": 600.0}
    scene.start("owner", "owner", num_rows=4, table=patient)
    scene.start("worker", "worker")
    scene.wait_for_end("worker", "owner")
    scene.assert_nothing_is_lost("worker", num_rows=4)


def test_of_two_processes_with_one_name_one_stops(scene: Scene) -> None:
    scene.start("owner", "owner", num_rows=60, row_seconds=0.05)
    scene.start("worker", "worker")
    scene.wait_for("worker", "trained")
    older = scene.names["worker"]
    scene.start("worker", "worker")
    newer = scene.names["worker"]
    wait_until(lambda: bool(scene.log("worker", "failed")), "one of them stops")
    assert "must not have one name" in scene.log("worker", "failed")[0]["error"]
    assert sorted([older.wait(60), newer.wait(60)]) == [0, 1]
    scene.wait_for_end("owner")
