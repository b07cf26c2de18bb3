"""Work that is only enqueued is timed by the GPU's clock, and nothing waits for it."""

import time
from collections.abc import Iterator

import pytest
import torch

from services.drafter_worker.device_clock import DeviceClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_CYCLES = 100_000_000  # about 50 ms


@pytest.fixture(scope="module")
def step_seconds() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)
    begin.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def train(clock: DeviceClock, waits: float) -> None:
    began_at = time.monotonic()
    clock.waits()
    time.sleep(waits)
    clock.waited(time.monotonic() - began_at)
    clock.begin()
    torch.cuda._sleep(_CYCLES)
    clock.end(1)


@pytest.mark.usefixtures("no_sync")
def test_a_step_takes_what_the_gpu_takes_and_its_rest_is_no_wait(step_seconds: float) -> None:
    clock = DeviceClock("cuda")
    for _ in range(6):
        train(clock, 0.5 * step_seconds)  # the GPU still works when the row is there
    time.sleep(7 * step_seconds)
    clock.waited(0.0)
    assert clock.step_seconds == pytest.approx(step_seconds, rel=0.1)
    assert clock.starved_seconds < step_seconds
    before = clock.starved_seconds
    for _ in range(6):
        train(clock, 3 * step_seconds)
    time.sleep(3 * step_seconds)
    clock.waited(0.0)
    # Each wait begins while the step before it runs, the first one aside.
    assert clock.starved_seconds - before == pytest.approx((3 + 5 * 2) * step_seconds, rel=0.1)


@pytest.mark.usefixtures("no_sync")
def test_a_meeting_begins_when_the_work_before_it_is_done(step_seconds: float) -> None:
    clock = DeviceClock("cuda")
    torch.cuda._sleep(_CYCLES)
    clock.begin_meeting()
    time.sleep(3 * step_seconds)
    clock.end_meeting()
    time.sleep(step_seconds)
    clock.waited(0.0)
    assert clock.sync_seconds == pytest.approx(2 * step_seconds, rel=0.1)
