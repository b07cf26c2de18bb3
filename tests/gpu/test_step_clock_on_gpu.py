"""Steps that are only enqueued are timed by the GPU's clock, and nothing waits for them."""

import time

import pytest
import torch

from services.drafter_worker.step_clock import StepClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_CYCLES = 20_000_000  # about 10 ms


def test_an_enqueued_step_has_the_time_that_the_gpu_takes() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)
    begin.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    torch.cuda.synchronize()
    expected = begin.elapsed_time(end) / 1e3
    clock = StepClock("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            clock.begin()
            torch.cuda._sleep(_CYCLES)
            clock.end(1)
            time.sleep(3 * expected)  # waits for rows are no part of it
        clock.begin()
        clock.end(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert clock.median == pytest.approx(expected, rel=0.2)
