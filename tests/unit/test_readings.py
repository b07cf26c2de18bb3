"""Readings of the state: few are made however many ask, and none is waited for longer than a second."""

import threading

import pytest

from services.control_plane.readings import FRESH_SECONDS, Readings
from services.control_plane.registry import Registry
from services.control_plane.status import Status
from services.control_plane.view import build_status
from tests.heartbeats import RUN, beat, worker_report

WATCHDOG_SECONDS = 30


class Source:
    """A registry whose status is counted, and can be held up."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_read = 0
        self.registry = Registry(RUN, 0.5, lambda: self.now)
        self.may_go = threading.Event()
        self.may_go.set()
        self.has_begun = threading.Event()

    def read(self) -> Status:
        self.num_read += 1
        self.has_begun.set()
        assert self.may_go.wait(WATCHDOG_SECONDS)
        return build_status(self.registry.snapshot(), RUN, "runs/demo")


@pytest.fixture
def source() -> Source:
    return Source()


def test_a_reading_is_made_again_when_it_is_no_longer_fresh(source: Source) -> None:
    readings = Readings(source.read, lambda: source.now)
    first = readings.latest()
    source.registry.take_heartbeat(beat("drafter_worker", report=worker_report()))
    source.now += FRESH_SECONDS / 2
    assert readings.latest() is first
    source.now += FRESH_SECONDS
    second = readings.latest()
    assert second is not first
    assert source.num_read == 2
    assert second.metrics is second.metrics
    assert b"drafter_steps_total" in second.metrics
    assert b'"step":7' in second.status_json


def test_a_reading_that_does_not_come_is_not_waited_for(source: Source) -> None:
    readings = Readings(source.read)
    source.may_go.clear()
    slow = threading.Thread(target=readings.latest)
    slow.start()
    try:
        assert source.has_begun.wait(WATCHDOG_SECONDS)
        assert readings.latest() is None
    finally:
        source.may_go.set()
        slow.join()
    assert readings.latest() is not None
