"""A step's time is that of all of its rows, and of nothing between them."""

import time

import pytest

from services.drafter_worker.step_clock import StepClock


class Timeline:
    """A clock under a time that only `train` lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self._now)
        self._clock = StepClock("cpu")

    def train(self, seconds: float, num_steps: int, *, waits: float = 0.0) -> None:
        self._now += waits
        self._clock.begin()
        self._now += seconds
        self._clock.end(num_steps)

    @property
    def median(self) -> float:
        return self._clock.median


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    return Timeline(monkeypatch)


def test_median_of_single_rows_without_waits(timeline: Timeline) -> None:
    assert timeline.median == 0.0
    for seconds in (0.1, 0.5, 0.2):
        timeline.train(seconds, 1, waits=30.0)
    assert timeline.median == pytest.approx(0.2)


def test_a_step_of_several_rows_takes_the_time_of_all(timeline: Timeline) -> None:
    for _ in range(3):
        timeline.train(0.1, 0, waits=1.0)
        timeline.train(0.3, 1, waits=1.0)
    assert timeline.median == pytest.approx(0.4)


def test_a_row_of_several_steps_is_shared_among_them(timeline: Timeline) -> None:
    timeline.train(0.8, 4)
    assert timeline.median == pytest.approx(0.2)


def test_weights_of_an_earlier_step_drop_what_was_measured(timeline: Timeline) -> None:
    timeline.train(5.0, 0)
    timeline.train(5.0, -7)
    assert timeline.median == 0.0
    timeline.train(0.1, 1)
    assert timeline.median == pytest.approx(0.1)
