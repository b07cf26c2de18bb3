"""How long steps take, by the clock of the device that runs them.

On a GPU a step is enqueued and goes on: the host's time for it is that of the launches where the worker waits
for rows, and the step's own only where it does not. Events on the stream measure both alike.
"""

import statistics
import time
from collections import deque
from typing import TypeAlias

import torch

_RECENT_STEPS = 32
Mark: TypeAlias = float | torch.cuda.Event


class StepClock:
    """The last steps' times, of the main thread; `median` may be read by any. Nothing waits for the GPU."""

    def __init__(self, device: str) -> None:
        """`device` is `run.device`."""
        self._on_gpu = device == "cuda"
        self._began: Mark = 0.0
        self._under_way: deque[tuple[Mark, Mark, int]] = deque()
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._of_step = 0.0
        """Seconds of rows whose step is not yet complete."""

    def begin(self) -> None:
        """Work on a row begins."""
        self._began = self._mark()

    def end(self, num_steps: int) -> None:
        """Work on the row is done or enqueued; `num_steps` optimizer steps were completed in it.

        A step takes the time of all of its rows. Weights taken over from another worker may be of an earlier
        step: `num_steps` is negative then, and what was measured for the step is dropped.
        """
        self._under_way.append((self._began, self._mark(), num_steps))
        while self._under_way:
            began, ended, count = self._under_way[0]
            seconds = _seconds_between(began, ended)
            if seconds is None:
                return
            self._under_way.popleft()
            self._add(seconds, count)

    @property
    def median(self) -> float:
        """Median seconds of a recent step; 0 where none is past."""
        recent = list(self._seconds)
        return statistics.median(recent) if recent else 0.0

    def _add(self, seconds: float, num_steps: int) -> None:
        self._of_step += seconds
        if num_steps > 0:
            self._seconds.append(self._of_step / num_steps)
        if num_steps != 0:
            self._of_step = 0.0

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(began: Mark, ended: Mark) -> float | None:
    """Return the seconds between two marks, or None where the GPU has not reached the second."""
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(began.elapsed_time(ended)) / 1e3 if ended.query() else None
    return float(ended) - float(began)
