"""What a worker's time goes into: a step's is that of all of its rows, and of nothing between them."""

import time

import pytest

from services.drafter_worker.device_clock import DeviceClock


class Timeline:
    """A clock under a time that only `train` lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self._now)
        self.clock = DeviceClock("cpu")

    def train(self, seconds: float, num_steps: int, *, waits: float = 0.0) -> None:
        self.clock.waits()
        self._now += waits
        self.clock.waited(waits)
        self.clock.begin()
        self._now += seconds
        self.clock.end(num_steps)

    def meet(self, seconds: float) -> None:
        self.clock.begin_meeting()
        self._now += seconds
        self.clock.end_meeting()


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    return Timeline(monkeypatch)


def test_median_of_single_rows_without_waits(timeline: Timeline) -> None:
    assert timeline.clock.step_seconds == 0.0
    for seconds in (0.1, 0.5, 0.2):
        timeline.train(seconds, 1, waits=30.0)
    assert timeline.clock.step_seconds == pytest.approx(0.2)


def test_a_step_of_several_rows_takes_the_time_of_all(timeline: Timeline) -> None:
    for _ in range(3):
        timeline.train(0.1, 0, waits=1.0)
        timeline.train(0.3, 1, waits=1.0)
    assert timeline.clock.step_seconds == pytest.approx(0.4)


def test_a_row_of_several_steps_is_shared_among_them(timeline: Timeline) -> None:
    timeline.train(0.8, 4)
    assert timeline.clock.step_seconds == pytest.approx(0.2)


def test_weights_of_an_earlier_step_drop_what_was_measured(timeline: Timeline) -> None:
    timeline.train(5.0, 0)
    timeline.train(5.0, -7)
    assert timeline.clock.step_seconds == 0.0
    timeline.train(0.1, 1)
    assert timeline.clock.step_seconds == pytest.approx(0.1)


def test_waits_for_rows_and_meetings_add_up(timeline: Timeline) -> None:
    timeline.train(0.1, 0, waits=0.5)
    timeline.clock.waits()
    timeline.clock.waited(2.0)  # no row came
    assert timeline.clock.starved_seconds == pytest.approx(2.5)
    timeline.train(0.1, 1, waits=0.25)
    timeline.meet(0.125)
    timeline.meet(0.5)
    assert timeline.clock.starved_seconds == pytest.approx(2.75)
    assert timeline.clock.sync_seconds == pytest.approx(0.625)
    assert timeline.clock.step_seconds == pytest.approx(0.2)
