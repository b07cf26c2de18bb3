"""What the control plane remembers: its bounds, its thinning, and what counts as an event."""

import itertools
from typing import Any

import pytest

from services.control_plane.changes import MAX_TEXT, find_changes, make_event
from services.control_plane.history import (
    KEPT_EVENTS,
    RECENT_SAMPLES,
    THINNED_SAMPLES,
    Recorder,
    make_sample,
)
from services.control_plane.registry import Registry
from services.control_plane.status import Status
from services.control_plane.view import build_status
from tests.heartbeats import (
    RUN,
    beat,
    evaluation,
    evaluator_report,
    goodbye,
    ring_report,
    target_report,
    worker_report,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A registry whose time is in the test's hands, and the changes since the last look."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.registry = Registry(RUN, 1.0, self.clock)
        self.before = self.status()

    def status(self) -> Status:
        return build_status(self.registry.snapshot(), RUN, "runs/demo")

    def hear(self, service: str, **fields: Any) -> None:
        self.registry.take_heartbeat(beat(service, **fields))

    def changes(self) -> list[tuple[str, str, str]]:
        after = self.status()
        found = find_changes(self.before, after)
        self.before = after
        return [(event.kind, event.instance, event.text) for event in found]


def status_at(time: float) -> Status:
    return Scene().status().model_copy(update={"time": time})


@pytest.mark.parametrize("num_seconds", [10, 800, 5000, 20_000])
def test_a_run_of_any_length_shows_from_its_start_to_its_end(num_seconds: int) -> None:
    recorder = Recorder()
    status = status_at(0.0)
    for second in range(num_seconds):
        recorder.take(status.model_copy(update={"time": 1000.0 + second}))
    times = [sample.time - 1000.0 for sample in recorder.since(0.0).samples]
    assert times[0] == 0.0
    assert times[-1] == num_seconds - 1
    assert times == sorted(set(times))
    assert len(times) <= RECENT_SAMPLES + THINNED_SAMPLES
    recent = times[-min(num_seconds, RECENT_SAMPLES) :]
    assert recent == list(range(num_seconds - len(recent), num_seconds))
    gaps = {later - earlier for earlier, later in itertools.pairwise(times)}
    stride = max(gaps, default=0)
    assert stride <= max(1, 2 * num_seconds / (THINNED_SAMPLES // 2)), "evenly over the run"


def test_only_what_is_later_is_told_again() -> None:
    recorder = Recorder()
    for time in (1.0, 2.0, 3.0):
        recorder.take(status_at(time))
    assert [sample.time for sample in recorder.since(0.0).samples] == [1.0, 2.0, 3.0]
    assert [sample.time for sample in recorder.since(2.0).samples] == [3.0]
    assert recorder.since(3.0).samples == ()


def test_events_are_bounded_in_number_and_length() -> None:
    recorder = Recorder()
    for number in range(KEPT_EVENTS + 5):
        recorder.note("command", "", f"command {number}")
    events = recorder.since(0.0).events
    assert len(events) == KEPT_EVENTS
    assert events[-1].text == f"command {KEPT_EVENTS + 4}"
    assert len(make_event(0.0, "error", "w", "x" * 9999).text) == MAX_TEXT


def test_many_checkpoints_push_no_event_of_another_kind_out() -> None:
    recorder = Recorder()
    recorder.note("watchdog", "main-0", "killed")
    recorder.note("join", "main-0", "its successor")
    for number in range(2 * KEPT_EVENTS):
        recorder.note("checkpoint", "main", f"step {number}")
    events = recorder.since(0.0).events
    assert [event.text for event in events[:2]] == ["killed", "its successor"]
    assert len(events) == KEPT_EVENTS + 2


def test_a_sample_has_the_figures_of_the_status() -> None:
    scene = Scene()
    scene.hear(
        "target_server", report=target_report(ring=ring_report(slots={"free": 1, "leased": 3}))
    )
    scene.hear("drafter_worker", session=2, report=worker_report(loss=1.5))
    sample = make_sample(scene.status())
    assert sample.ring_used_shares == {"target-0": 0.75}
    assert sample.target_tokens_per_second == 1638.4
    assert (sample.groups["main"].loss, sample.groups["main"].step) == (1.5, 7)
    assert sample.groups["main"].held_out_acceptance_length == 1.75


def test_a_ring_without_slots_is_empty() -> None:
    scene = Scene()
    scene.hear("target_server", report=target_report(ring=ring_report(slots={})))
    assert make_sample(scene.status()).ring_used_shares == {"target-0": 0.0}


def test_joins_ends_and_states_are_events_once() -> None:
    scene = Scene()
    scene.hear("drafter_worker", session=2)
    joined = ("join", "worker-0", "drafter_worker, pid 100 on here")
    assert scene.changes() == [("state", "", "waiting -> running"), joined]
    assert scene.changes() == []
    scene.registry.take_goodbye(goodbye("drafter_worker", 2))
    assert scene.changes() == [("state", "", "running -> done"), ("leave", "worker-0", "ended")]
    scene.hear("drafter_worker", session=3)
    assert joined in scene.changes(), "another session under the same name"


def test_a_failure_is_told_with_its_reason() -> None:
    scene = Scene()
    scene.hear("drafter_worker", session=2)
    scene.changes()
    scene.registry.take_goodbye(goodbye("drafter_worker", 2, 1, "out of memory"))
    told = scene.changes()
    assert ("leave", "worker-0", "failed: out of memory") in told
    assert ("error", "worker-0", "exit code 1: out of memory") in told


def test_the_watchdog_is_told_when_it_barks_and_when_it_is_over() -> None:
    scene = Scene()
    scene.hear("drafter_worker", session=2, report=worker_report())
    scene.changes()
    scene.clock.now = 10.0
    (barks,) = [change for change in scene.changes() if change[0] == "watchdog"]
    assert barks[2].startswith("worker-0 (pid 100, step 7) is silent: no heartbeat for 10 s")
    scene.hear("drafter_worker", session=2, number=2, report=worker_report())
    over = ("watchdog", "worker-0", "back from silent, in phase running")
    assert over in scene.changes()


def test_checkpoints_evaluations_and_alarms_are_events() -> None:
    scene = Scene()
    scene.hear("drafter_worker", session=2, report=worker_report(checkpoint=""))
    scene.changes()
    path = "runs/demo/checkpoints/main/0/step-000009"
    scene.hear("drafter_worker", session=2, number=2, report=worker_report(checkpoint=path))
    assert scene.changes() == [("checkpoint", "main", "main/0/step-000009")]
    result = evaluation(acceptance_length=1.5, best_acceptance_length=2.5, has_regressed=True)
    scene.hear("evaluator", session=3, report=evaluator_report(results=(result,)))
    told = scene.changes()
    assert ("evaluation", "main",
            "acceptance length 1.500 at step 5 (arm main, temperature 0)") in told  # fmt: skip
    assert [change[1] for change in told if change[0] == "alarm"] == ["main"]


def test_an_error_that_comes_again_from_another_session_is_told_again() -> None:
    scene = Scene()
    scene.hear("drafter_worker", session=2, errors=("disk full",))
    assert ("error", "worker-0", "disk full") in scene.changes()
    scene.hear("drafter_worker", session=2, number=2, errors=("disk full",))
    assert scene.changes() == []
    scene.hear("drafter_worker", session=3, errors=("disk full",))
    assert ("error", "worker-0", "disk full") in scene.changes()
