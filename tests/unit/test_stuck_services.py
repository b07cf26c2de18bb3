"""Whom the launcher ends as stuck, by what /status says of who is overdue."""

from typing import Any

import pytest

from services.control_plane.registry import Registry
from services.control_plane.view import build_status
from services.launcher.config import LauncherTable
from services.launcher.up import is_stuck
from tests.heartbeats import RUN, beat, target_report, worker_report

LOADING = {"phase": "loading", "progress": 0}
RESUMED = {"progress": 64, "report": worker_report(seconds_to_first_step=None)}
TRAINING = {"progress": 65, "report": worker_report()}


def is_ended(service: str, silent_seconds: float, state: dict[str, Any], **table: float) -> bool:
    now = 0.0
    registry = Registry(RUN, 0.5, lambda: now)
    registry.take_heartbeat(beat(service, **state))
    now += silent_seconds
    overdue = build_status(registry.snapshot(), RUN, "runs/demo").model_dump(mode="json")["overdue"]
    return any(is_stuck(entry, LauncherTable.model_validate(table)) for entry in overdue)


@pytest.mark.parametrize(
    ("service", "state"),
    [
        ("drafter_worker", LOADING),
        ("drafter_worker", {"phase": "compiling", "progress": 0}),
        ("drafter_worker", RESUMED),
        ("target_server", LOADING),
        ("target_server", {"progress": 0, "report": target_report()}),
        ("evaluator", LOADING),
    ],
)
def test_who_has_not_begun_is_given_the_time_of_a_start(service: str, state: dict) -> None:
    table = {"stuck_seconds": 4.0, "start_seconds": 60.0}
    assert not is_ended(service, 59.0, state, **table)
    assert is_ended(service, 61.0, state, **table)


@pytest.mark.parametrize(
    ("service", "state"),
    [
        ("drafter_worker", TRAINING),
        ("target_server", {"progress": 1, "report": target_report()}),
        ("evaluator", {"progress": 1}),
    ],
)
def test_who_has_begun_is_ended_after_stuck_seconds(service: str, state: dict) -> None:
    assert not is_ended(service, 3.0, state, stuck_seconds=4.0)
    assert is_ended(service, 5.0, state, stuck_seconds=4.0)


@pytest.mark.parametrize("state", [LOADING, TRAINING])
def test_nobody_is_ended_where_no_time_is_set(state: dict) -> None:
    assert not is_ended("drafter_worker", 1e6, state)


def test_a_start_is_never_shorter_than_stuck_seconds() -> None:
    table = {"stuck_seconds": 100.0, "start_seconds": 60.0}
    assert not is_ended("drafter_worker", 90.0, LOADING, **table)
