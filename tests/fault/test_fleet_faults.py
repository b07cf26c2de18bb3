"""Runs of several rings, and of several groups on one, while processes are killed and stopped."""

import json
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fleet_programs import Plan, checkpoints, consumed_in, start
from tests.forks import Fork
from tests.rings import wait_until

ROWS = 60
QUICK = {
    "lease_seconds": 0.4, "lease_max_seconds": 0.8, "session_timeout_seconds": 0.8,
    "resume_wait_seconds": 0.4, "max_attempts": 20,
}  # fmt: skip


@dataclass
class Fleet:
    """The processes of one test, by name, and what they have written down."""

    folder: Path
    shared_memory: Path
    processes: list[Fork] = field(default_factory=list)
    names: dict[str, Fork] = field(default_factory=dict)

    def start(self, kind: str, *names: str, **plan: Any) -> None:
        for name in names:
            whole = Plan(
                str(self.folder), str(self.shared_memory), name, **{"table": QUICK, **plan}
            )
            process = start(kind, whole)
            self.processes.append(process)
            self.names[name] = process

    def start_targets(self, *names: str, **plan: Any) -> None:
        """Start targets and wait until each has its ring: none is ahead when a worker comes."""
        self.start("target", *names, **plan)
        for name in names:
            self.wait_for(name, "ready")

    def kill(self, *names: str) -> None:
        for name in names:
            self.names[name].kill()
            self.names[name].wait(60)

    def log(self, name: str, event: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.log"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        entries = map(json.loads, whole.splitlines())
        return [entry for entry in entries if entry["event"] == event]

    def wait_for(self, name: str, event: str, count: int = 1) -> None:
        wait_until(lambda: len(self.log(name, event)) >= count, f"{name}: {count} {event}")

    def wait_for_end(self, *names: str) -> None:
        for name in names:
            assert self.names[name].wait(100) == 0, (self.folder / f"{name}.err").read_text()

    def target_of(self, index: int) -> str:
        """Return the name of the target that has claimed a ring last."""
        claims = [
            (path.stat().st_mtime_ns, path.stem)
            for path in self.folder.glob("target*.log")
            for entry in self.log(path.stem, "ready")[-1:]
            if entry["index"] == index
        ]
        return max(claims)[1]

    def rows_seen(self, ring: int, num_rings: int = 2) -> int:
        """Count the rows of one ring that any worker has trained on."""
        entries = [e for path in self.folder.glob("w*.log") for e in self.log(path.stem, "trained")]
        return sum(entry["sequence"] % num_rings == ring for entry in entries)

    def trained(self, group: str = "main") -> Counter[int]:
        """Count each row in the weights that survive."""
        return Counter(row for state in checkpoints(self.folder, group) for row in state["trained"])

    def report(self, name: str) -> dict[str, Any]:
        return self.log(name, "done")[-1]["report"]

    def account(self, name: str, group: str = "main") -> dict[str, Any]:
        return next(a for a in self.report(name)["groups"] if a["group"] == group)

    def assert_every_row_is_trained(self, targets: tuple[str, ...], again: int = 0) -> None:
        """Each row is trained, at most `again` of them more than once beyond their requeues."""
        trained = self.trained()
        assert sorted(trained) == list(range(ROWS))
        for state in checkpoints(self.folder, "main"):
            assert all(row in consumed_in(state) for row in state["trained"])
        repeats = 0
        for name in targets:
            account = self.account(name)
            assert (account["poison"], account["skipped"], account["open"]) == (0, 0, 0)
            assert account["published"] == account["released"]
            assert self.report(name)["slots"] == {"free": 4, "writing": 0, "published": 0}
            repeats += account["requeued"] + account["recaptured"]
        assert sum(trained.values()) <= ROWS + repeats + again
        for index in range(len(targets)):
            assert not (self.folder / f"target-{index}.sock").exists()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Give the test a run of its own; end its processes by their ids; nothing may be left."""
    with (
        tempfile.TemporaryDirectory(prefix="rd-") as folder,
        tempfile.TemporaryDirectory(prefix="rd-test-", dir="/dev/shm") as shared_memory,
    ):
        fleet = Fleet(Path(folder), Path(shared_memory))
        yield fleet
        running = [process for process in fleet.processes if process.poll() is None]
        for process in fleet.processes:
            process.kill()
            process.wait(60)
        assert [process.args for process in running] == []
        assert list(Path(shared_memory).iterdir()) == []


TARGETS, WORKERS = ("target-a", "target-b"), ("w1", "w2")
PATIENT = {"lease_seconds": 30.0, "lease_max_seconds": 60.0, "session_timeout_seconds": 30.0}


def test_two_targets_and_two_workers_train_every_row_once(fleet: Fleet) -> None:
    fleet.start("worker", *WORKERS)
    for name in WORKERS:
        fleet.wait_for(name, "started")
    fleet.start_targets(*TARGETS, row_seconds=0.01)
    fleet.wait_for_end(*TARGETS, *WORKERS)
    fleet.assert_every_row_is_trained(TARGETS)
    assert set(fleet.trained().values()) == {1}
    assert [fleet.account(name)["published"] for name in TARGETS] == [ROWS // 2, ROWS // 2]
    assert {entry["index"] for name in TARGETS for entry in fleet.log(name, "ready")} == {0, 1}
    assert fleet.log("w1", "done")[0]["total_rows"] == ROWS
    assert all(fleet.log(name, "trained") for name in WORKERS)


def test_a_killed_target_costs_the_other_ring_nothing_and_comes_back_to_its_own(
    fleet: Fleet,
) -> None:
    # Nothing times out and no descriptor goes twice, however slow the machine is.
    calm = {**QUICK, **PATIENT, "heartbeat_seconds": 0.5}
    fleet.start_targets(*TARGETS, row_seconds=0.03, table=calm)
    fleet.start("worker", *WORKERS)
    wait_until(lambda: fleet.rows_seen(0) > 4 and fleet.rows_seen(1) > 4, "both rings are read")
    doomed, other = fleet.target_of(0), fleet.target_of(1)
    fleet.kill(doomed)
    wait_until(lambda: fleet.rows_seen(1) >= 15, "rows of the other target are trained on")
    assert fleet.rows_seen(0) < ROWS // 2
    fleet.start("target", doomed)
    fleet.wait_for_end(*TARGETS, *WORKERS)
    assert [entry["index"] for entry in fleet.log(doomed, "ready")] == [0, 0]
    # What was in the workers' copies when the owner died may come again.
    fleet.assert_every_row_is_trained(TARGETS, again=2 * 2)
    report = fleet.report(other)
    assert report["reclaimed"] == {}
    assert sum(report["stale_calls"].values()) == 0


def test_a_killed_worker_s_rows_of_both_rings_are_trained_by_the_other(fleet: Fleet) -> None:
    fleet.start_targets(*TARGETS, row_seconds=0.02)
    fleet.start("worker", "w1", commit_every=1000)
    fleet.start("worker", "w2")
    wait_until(
        lambda: {entry["sequence"] % 2 for entry in fleet.log("w1", "trained")} == {0, 1},
        "it has rows of both rings",
    )
    fleet.wait_for("w1", "trained", 6)
    fleet.kill("w1")
    fleet.wait_for_end(*TARGETS, "w2")
    fleet.assert_every_row_is_trained(TARGETS)
    assert set(fleet.trained()) == set(range(ROWS)), "the dead one had no checkpoint"
    assert all(fleet.account(name)["recaptured"] > 0 for name in TARGETS)


@pytest.mark.parametrize("num_targets", [1, 3])
def test_a_killed_run_goes_on_with_another_number_of_targets(
    fleet: Fleet, num_targets: int
) -> None:
    fleet.start_targets(*TARGETS, row_seconds=0.02)
    fleet.start("worker", *WORKERS, commit_every=3)
    wait_until(
        lambda: all(sum(row % 2 == ring for row in fleet.trained()) > 5 for ring in (0, 1)),
        "rows of both rings are durable",
    )
    fleet.kill(*TARGETS, *WORKERS)
    durable = fleet.trained()
    assert len(durable) < ROWS
    names = tuple(f"target-{number}" for number in range(num_targets))
    fleet.start("target", *names, num_targets=num_targets)
    fleet.start("worker", *WORKERS, num_targets=num_targets)
    fleet.wait_for_end(*names, *WORKERS)
    fleet.assert_every_row_is_trained(names)
    assert {fleet.trained()[row] for row in durable} == {1}, "no durable row is made again"
    published = sum(fleet.account(name)["published"] for name in names)
    assert published <= ROWS - len(durable)


def test_a_stopped_target_holds_no_row_of_the_others_up(fleet: Fleet) -> None:
    fleet.start_targets(*TARGETS, row_seconds=0.03)
    fleet.start("worker", *WORKERS)
    wait_until(lambda: fleet.rows_seen(0) > 2 and fleet.rows_seen(1) > 2, "both rings are read")
    stopped = fleet.names[fleet.target_of(0)]
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: fleet.rows_seen(1) == ROWS // 2, "the other ring is read to its end")
    assert fleet.rows_seen(0) < ROWS // 2
    stopped.send_signal(signal.SIGCONT)
    fleet.wait_for_end(*TARGETS, *WORKERS)
    fleet.assert_every_row_is_trained(TARGETS)


def test_one_target_too_many_is_refused_and_the_run_goes_on(fleet: Fleet) -> None:
    fleet.start_targets(*TARGETS, row_seconds=0.01)
    fleet.start("target", "target-c")
    assert fleet.names["target-c"].wait(60) != 0
    assert "raise target.replicas" in (fleet.folder / "target-c.err").read_text()
    fleet.start("worker", "w1")
    fleet.wait_for_end(*TARGETS, "w1")
    fleet.assert_every_row_is_trained(TARGETS)


GROUPS = {"steady": {}, "late": {"policy": "skip", "group_timeout_seconds": 0.3}}


def test_a_slow_group_that_may_skip_holds_nobody_up_and_every_row_has_an_account(
    fleet: Fleet,
) -> None:
    fleet.start("target", "target", num_targets=1, table=PATIENT, groups=GROUPS)
    fleet.start("worker", "w-steady", num_targets=1, group="steady")
    fleet.start("worker", "w-late", num_targets=1, group="late", row_seconds=0.25)
    fleet.wait_for_end("target", "w-steady", "w-late")
    steady, late = (fleet.account("target", group) for group in GROUPS)
    assert set(fleet.trained("steady")) == set(range(ROWS))
    assert steady["skipped"] == 0
    assert late["skipped"] > 0
    assert late["published"] == late["released"] + late["skipped"] == ROWS
    assert len(fleet.trained("late")) == late["committed"] == late["released"] > 0
    # A skipped row is settled: the checkpoint that ends the run lists it like a trained one.
    (state,) = checkpoints(fleet.folder, "late")
    assert consumed_in(state).low == ROWS


def test_a_slow_group_that_waits_holds_the_ring_and_gets_every_row(fleet: Fleet) -> None:
    groups = {"steady": {}, "slow": {}}
    fleet.start("target", "target", num_targets=1, table=PATIENT, groups=groups)
    fleet.start("worker", "w-steady", num_targets=1, group="steady")
    fleet.start("worker", "w-slow", num_targets=1, group="slow", row_seconds=0.03)
    fleet.wait_for_end("target", "w-steady", "w-slow")
    for group in groups:
        assert set(fleet.trained(group)) == set(range(ROWS))
        assert fleet.account("target", group)["skipped"] == 0


def test_a_group_that_never_comes_is_named_and_then_detached(fleet: Fleet) -> None:
    groups = {"main": {}, "away": {"detach_after_seconds": 1.5}}
    fleet.start("target", "target", num_targets=1, table=PATIENT, groups=groups)
    fleet.start("worker", "w", num_targets=1)
    fleet.wait_for_end("target", "w")
    assert set(fleet.trained()) == set(range(ROWS))
    away = fleet.account("target", "away")
    assert (away["published"], away["skipped"], away["released"]) == (ROWS, ROWS, 0)
    (absent,) = fleet.report("target")["absent_groups"]
    assert (absent["group"], absent["is_detached"]) == ("away", True)
    seen = [entry["report"]["absent_groups"] for entry in fleet.log("target", "report")]
    assert any(
        [(report["group"], report["is_detached"]) for report in reports] == [("away", False)]
        for reports in seen
    )


def test_a_detached_group_s_worker_that_comes_gets_the_rest(fleet: Fleet) -> None:
    groups = {"main": {}, "away": {"detach_after_seconds": 0.5}}
    fleet.start("target", "target", num_targets=1, table=PATIENT, groups=groups, row_seconds=0.1)
    fleet.start("worker", "w-main", num_targets=1)
    fleet.wait_for("w-main", "trained", 12)
    fleet.start("worker", "w-away", num_targets=1, group="away")
    fleet.wait_for_end("target", "w-main", "w-away")
    away = fleet.account("target", "away")
    assert away["skipped"] > 0
    assert away["committed"] == len(fleet.trained("away")) > 0
    assert away["skipped"] + away["committed"] == ROWS
    assert fleet.report("target")["absent_groups"] == []


def test_watermarks_let_the_ring_drain_before_the_target_goes_on(fleet: Fleet) -> None:
    table = {**PATIENT, "num_slots": 4, "low_watermark": 0.25}
    fleet.start("target", "target", num_targets=1, table=table)
    fleet.start("worker", "w", num_targets=1, table=table, row_seconds=0.02)
    fleet.wait_for_end("target", "w")
    assert set(fleet.trained()) == set(range(ROWS))
    report = fleet.report("target")
    assert (report["high_watermark"], report["low_watermark"]) == (4, 1)
    blocked = [e["report"] for e in fleet.log("target", "report") if e["report"]["is_blocked"]]
    assert all(report["slots"]["published"] > 1 for report in blocked)
    assert any(report["slots"]["published"] < 4 for report in blocked), "it waits on below the top"
