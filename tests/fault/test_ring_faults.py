"""Processes that are killed and stopped: what they held comes back, and nothing is left behind."""

import signal
import time
from pathlib import Path

from common.contracts.sequences import SequenceSet
from tests.ring_scene import END_SECONDS, PATIENT, QUICK, ROWS, Scene
from tests.rings import wait_until


def test_rows_of_a_killed_worker_are_trained_by_the_other(scene: Scene) -> None:
    """It dies in a copy, with rows that are trained and not committed."""
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "doomed", commit_every=3, hold_in="copying", hold_at=5)
    scene.wait_for("doomed", "holding")
    scene.start("worker", "other")
    scene.wait_for("other", "trained")
    scene.signal("doomed", signal.SIGKILL)
    scene.wait_for_end("owner", "other")
    scene.assert_nothing_is_lost()
    durable = scene.trained("doomed")
    assert len(durable) == 3
    lost = {entry["sequence"] for entry in scene.log("doomed", "trained")} - set(durable)
    held = {entry["sequence"] for entry in scene.log("doomed", "holding")}
    assert len(lost) == 2
    assert lost | held <= set(scene.trained("other"))
    (account,) = scene.report()["groups"]
    assert account["recaptured"] >= 2
    assert account["requeued"] >= 1


def test_a_killed_worker_that_comes_back_trains_nothing_that_it_had_committed(scene: Scene) -> None:
    """Nothing times out here: its new session ends the old one."""
    scene.start("owner", "owner", num_rows=ROWS, table=PATIENT)
    scene.start("worker", "worker", commit_every=3, hold_in="copying", hold_at=8)
    scene.wait_for("worker", "holding")
    scene.signal("worker", signal.SIGKILL)
    durable = scene.trained()
    scene.start("worker", "worker", commit_every=3)
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost()
    assert len(durable) == 6
    assert {row: scene.trained()[row] for row in durable} == durable


def test_a_stopped_worker_is_fenced_and_goes_on_in_a_fresh_session(scene: Scene) -> None:
    """It is stopped in a copy, past its lease and its session, while its slot is written again."""
    rows = 60
    scene.start("owner", "owner", num_rows=rows, row_seconds=0.05)
    scene.start("worker", "stopped", hold_in="copying", hold_at=4, capacity=1)
    scene.wait_for("stopped", "holding")
    scene.signal("stopped", signal.SIGSTOP)
    scene.start("worker", "other", commit_every=2)
    scene.wait_for("other", "trained", 30)
    scene.go("stopped")
    scene.signal("stopped", signal.SIGCONT)
    scene.wait_for_end("owner", "other", "stopped")
    scene.assert_nothing_is_lost(num_rows=rows)
    held = scene.log("stopped", "holding")[0]["sequence"]
    assert [entry["sequence"] for entry in scene.log("stopped", "torn")] == [held]
    assert held in scene.trained("other")
    assert scene.report()["reclaimed"]["expired"] >= 1
    assert scene.report()["stale_calls"]["heartbeat"] >= 1
    assert "begin a fresh one" in scene.errors("stopped")


def test_a_row_of_a_worker_that_hangs_and_beats_goes_to_another(scene: Scene) -> None:
    """Its heartbeats list the lease and cannot keep it for ever (R5)."""
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "hung", hold_in="copying", hold_at=3)
    scene.wait_for("hung", "holding")
    held = scene.log("hung", "holding")[0]["sequence"]
    scene.start("worker", "other")
    wait_until(
        lambda: held in [entry["sequence"] for entry in scene.log("other", "trained")],
        "the other worker trains the row",
    )
    scene.go("hung")
    scene.wait_for_end("owner", "hung", "other")
    scene.assert_nothing_is_lost()
    assert scene.report()["reclaimed"]["expired"] >= 1
    assert len(scene.deliveries(held)) >= 2


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
    scene.assert_nothing_is_lost(num_rows=rows)
    settled = SequenceSet.model_validate(
        scene.log("owner", "ready")[-1]["settled"]["main"], strict=False
    )
    pid = scene.names["owner"].pid
    again = {entry["sequence"] for entry in scene.log("owner", "publishing", pid)}
    assert not [sequence for sequence in again if sequence in settled]
    # What live workers had trained or staged beyond their checkpoints is not made again (R8).
    assert len(first & again) <= 2 * 2 + 4


def test_a_row_whose_writer_was_killed_is_written_by_its_successor(scene: Scene) -> None:
    scene.start("worker", "worker")
    scene.start("owner", "owner", num_rows=ROWS, hold_in="writing", hold_at=6)
    scene.wait_for("owner", "holding")
    scene.wait_for("worker", "trained", 6)
    scene.signal("owner", signal.SIGKILL)
    scene.start("owner", "owner", num_rows=ROWS)
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost()
    assert scene.trained("worker")[6] == 1


def test_a_run_whose_processes_were_all_killed_starts_clean(scene: Scene) -> None:
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "one", commit_every=3, hold_in="copying", hold_at=6)
    scene.start("worker", "two", commit_every=3, hold_in="copying", hold_at=5)
    for name in ("one", "two"):
        scene.wait_for(name, "holding")
    for name in ("one", "owner", "two"):
        scene.signal(name, signal.SIGKILL)
    assert len(scene.segments()) == 1
    durable = scene.trained()
    for name in ("one", "owner", "two"):
        scene.start("owner" if name == "owner" else "worker", name, num_rows=ROWS)
    scene.wait_for_end("owner", "one", "two")
    scene.assert_nothing_is_lost()
    assert {row: scene.trained()[row] for row in durable} == durable
    assert scene.log("owner", "reclaimed")[-1]["num_bytes"] > 0


def test_an_owner_that_was_stopped_blames_no_worker(scene: Scene) -> None:
    patient = QUICK | {
        "lease_seconds": 1.2,
        "lease_max_seconds": 60.0,
        "session_timeout_seconds": 1.2,
    }
    # Held while it writes, the owner's main thread does not listen: else it could hear the worker's
    # heartbeats before the ring thread looks at the clock.
    scene.start("owner", "owner", num_rows=ROWS, table=patient, hold_in="writing", hold_at=9)
    scene.start("worker", "worker", hold_in="copying", hold_at=6)
    for name in ("worker", "owner"):
        scene.wait_for(name, "holding")
    scene.signal("owner", signal.SIGSTOP)
    time.sleep(3.0)
    scene.signal("owner", signal.SIGCONT)
    time.sleep(0.5)
    scene.go("owner")
    scene.go("worker")
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost()
    assert scene.report()["reclaimed"] == {}
    assert scene.report()["stale_calls"] == {"held": 0}
    assert set(scene.trained("worker").values()) == {1}


def test_a_machine_that_slept_blames_no_worker(scene: Scene) -> None:
    """All processes stop; the owner is the first to go on, and has heard of nobody for long."""
    patient = QUICK | {
        "lease_seconds": 3.0, "lease_max_seconds": 60.0, "session_timeout_seconds": 3.0,
    }  # fmt: skip
    scene.start("owner", "owner", num_rows=ROWS, row_seconds=0.02, table=patient)
    scene.start("worker", "worker", hold_in="copying", hold_at=6)
    scene.wait_for("worker", "holding")
    scene.signal("worker", signal.SIGSTOP)
    time.sleep(0.2)  # what it has said is heard
    scene.signal("owner", signal.SIGSTOP)
    time.sleep(5.0)
    scene.signal("owner", signal.SIGCONT)
    time.sleep(0.4)
    scene.signal("worker", signal.SIGCONT)
    scene.go("worker")
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost()
    assert scene.report()["reclaimed"] == {}
    assert set(scene.trained("worker").values()) == {1}


def test_a_worker_that_cannot_map_the_ring_costs_no_row_an_attempt(
    scene: Scene, tmp_path: Path
) -> None:
    """Each of its lives would spend one if it were granted rows before it can read them."""
    table = QUICK | {"max_attempts": 2, "session_timeout_seconds": 600.0}
    scene.start("owner", "owner", num_rows=4, table=table)
    scene.wait_for("owner", "published", 4)
    for life in range(3):
        scene.start("worker", "blind", shared_memory=tmp_path)
        assert scene.wait_for_exit("blind") == 1
        assert "must share /dev/shm" in scene.log("blind", "failed")[life]["error"]
    scene.start("worker", "worker")
    scene.wait_for_end("owner", "worker")  # in time, since the blind one has said goodbye
    scene.assert_nothing_is_lost(num_rows=4)
    assert scene.report()["reclaimed"] == {}
    assert scene.account()["requeued"] == 0


def test_an_owner_whose_file_is_removed_ends_with_the_cause_and_its_successor_serves_on(
    scene: Scene,
) -> None:
    """As logind's RemoveIPC does it; the worker has the old ring mapped."""
    scene.start("owner", "owner", num_rows=ROWS, table=PATIENT, row_seconds=0.2)
    scene.start("worker", "worker", commit_every=3)
    scene.wait_for("worker", "saved")
    (name,) = scene.segments()
    (scene.shared_memory / name).unlink()
    assert scene.wait_for_exit("owner") == 1
    error = scene.log("owner", "failed")[0]["error"]
    for part in ("SegmentError", name, "was removed", "RemoveIPC", "start it again"):
        assert part in error
    scene.start("owner", "owner", num_rows=ROWS)
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost()


def test_a_goodbye_arrives_even_if_its_process_ends_at_once(scene: Scene) -> None:
    """Without it the owner would stay until the session times out."""
    patient = QUICK | {"session_timeout_seconds": 600.0}
    scene.start("owner", "owner", num_rows=4, table=patient)
    scene.start("worker", "worker")
    scene.wait_for_end("worker", "owner")
    scene.assert_nothing_is_lost(num_rows=4)


def test_of_two_processes_with_one_name_one_stops(scene: Scene) -> None:
    scene.start("owner", "owner", num_rows=60, row_seconds=0.05)
    scene.start("worker", "worker")
    scene.wait_for("worker", "trained")
    older = scene.names["worker"]
    scene.start("worker", "worker")
    newer = scene.names["worker"]
    wait_until(lambda: bool(scene.log("worker", "failed")), "one of them stops")
    assert "must not have one name" in scene.log("worker", "failed")[0]["error"]
    for process in (older, newer):
        process.join(END_SECONDS)
    assert {older.exitcode, newer.exitcode} == {0, 1}
    scene.wait_for_end("owner")
