"""What a run as a whole is said to do, from what its services say of themselves."""

from typing import Any

import pytest

from services.control_plane.registry import Registry
from services.control_plane.status import Status
from services.control_plane.view import build_status
from tests.heartbeats import RUN, beat, goodbye, target_report, worker_report


@pytest.fixture
def registry() -> Registry:
    return Registry(RUN, 60.0)


def status_of(registry: Registry) -> Status:
    return build_status(registry.snapshot(), RUN, "runs/demo")


@pytest.mark.parametrize(
    ("phases", "state"),
    [
        (("compiling",), "starting"),
        (("running", "compiling"), "running"),
        (("paused", "paused"), "paused"),
        (("done", "running"), "running"),
        (("done", "done"), "done"),
        (("failed",), "failed"),
        (("failed", "running"), "running"),  # its row and the errors tell of the other
        (("failed", "done"), "done"),
        (("failed", "failed"), "failed"),
    ],
)
def test_the_state_of_a_run_sums_up_its_workers(
    registry: Registry, phases: tuple[str, ...], state: str
) -> None:
    for session, phase in enumerate(phases):
        registry.take_heartbeat(
            beat("drafter_worker", session, instance=f"w{session}", phase=phase)
        )
    assert status_of(registry).run.state == state


def test_a_run_is_starting_until_a_target_has_a_ring_for_workers_that_wait(
    registry: Registry,
) -> None:
    def state(number: int, **target: Any) -> tuple[str, str]:
        registry.take_heartbeat(beat("target_server", 1, number, **target))
        status = status_of(registry)
        return status.run.state, status.not_ready_reason

    registry.take_heartbeat(beat("drafter_worker", 2, phase="waiting", report=worker_report()))
    answers = "writes the held-out answers"
    told, reason = state(1, phase="measuring", detail=answers, report=target_report(ring=None))
    assert told == "starting"
    assert answers in reason
    assert state(2, report=target_report()) == ("running", "")
    # One that was killed: what its successor says counts, when it is there.
    registry.take_goodbye(goodbye("target_server", 1, 1))
    registry.take_heartbeat(beat("target_server", 3, phase="loading"))
    assert status_of(registry).run.state == "starting"


def test_a_run_whose_worker_is_late_runs_and_says_why_it_is_not_ready() -> None:
    now = [100.0]
    registry = Registry(RUN, 2.0, clock=lambda: now[0])
    registry.take_heartbeat(beat("target_server", 1, report=target_report()))
    registry.take_heartbeat(beat("drafter_worker", 2, report=worker_report()))
    now[0] += 30.0
    registry.take_heartbeat(beat("target_server", 1, 2, report=target_report()))
    status = status_of(registry)
    assert status.run.state == "running"
    assert "is silent" in status.not_ready_reason


def test_a_worker_that_waits_for_a_gpu_does_not_run(registry: Registry) -> None:
    registry.take_heartbeat(beat("target_server", 1, report=target_report()))
    registry.take_heartbeat(beat("drafter_worker", 2, phase="waiting", detail="no GPU has room"))
    status = status_of(registry)
    assert status.run.state == "starting"
    assert "no GPU has room" in status.not_ready_reason
