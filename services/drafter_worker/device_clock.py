"""What a worker's time goes into, by the clock of the device that works.

On a GPU a step is enqueued and goes on by itself: the host's time for it is that of the launches, and the
host waits for a row or a meeting while the GPU still works. Events on the stream tell when it worked, and
are read once they are past: nothing waits for the GPU.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import torch

_RECENT_STEPS = 32
Mark: TypeAlias = float | torch.cuda.Event


@dataclass(frozen=True)
class _Row:
    """Work on a row that may not be past."""

    last_ended: Mark
    began: Mark
    ended: Mark
    num_steps: int
    waited: float
    """Seconds that the host waited for it."""
    idle: float
    """Those of them that are counted already."""


class DeviceClock:
    """Written by the main thread; its figures may be read by any.

    for each row   waits, waited (as often as there is none), begin, end
    """

    def __init__(self, device: str) -> None:
        """`device` is `run.device`."""
        self._on_gpu = device == "cuda"
        self._rows: deque[_Row] = deque()
        self._meetings: deque[tuple[Mark, Mark]] = deque()
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._of_step = 0.0
        """Seconds of rows whose step is not yet complete."""
        self._began = self._ended = self._met = self._mark()
        self._is_idle = True
        self._waited = self._idle = 0.0
        self.starved_seconds = 0.0
        """Seconds without work for want of a row."""
        self.sync_seconds = 0.0
        """Seconds of meetings, less those in which the work before them was not done."""

    @property
    def step_seconds(self) -> float:
        """Median seconds of a recent step, of all of its rows; 0 where none is past."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else 0.0

    def waits(self) -> None:
        """The host begins to wait for a row."""
        self._is_idle = _is_past(self._ended)

    def waited(self, seconds: float) -> None:
        """The host has waited for so long; a wait behind work that was done is counted at once."""
        self._waited += seconds
        if self._is_idle:
            self._idle += seconds
            self.starved_seconds += seconds
        self._settle()

    def begin(self) -> None:
        """Work on a row begins."""
        self._began = self._mark()

    def end(self, num_steps: int) -> None:
        """Work on the row is done or enqueued; `num_steps` optimizer steps were completed in it.

        A step takes the time of all of its rows. Weights taken over from another worker may be of an earlier
        step: `num_steps` is negative then, and what was measured for the step is dropped.
        """
        ended = self._mark()
        row = _Row(self._ended, self._began, ended, num_steps, self._waited, self._idle)
        self._rows.append(row)
        self._ended, self._waited, self._idle = ended, 0.0, 0.0
        self._settle()

    def begin_meeting(self) -> None:
        """A meeting of the group begins; the work before it may not be done."""
        self._met = self._mark()

    def end_meeting(self) -> None:
        """The meeting is over."""
        self._meetings.append((self._met, self._mark()))
        self._settle()

    def _settle(self) -> None:
        while self._rows and _is_past(self._rows[0].ended):
            self._add(self._rows.popleft())
        while self._meetings and _is_past(self._meetings[0][1]):
            self.sync_seconds += _seconds_between(*self._meetings.popleft())

    def _add(self, row: _Row) -> None:
        gap = _seconds_between(row.last_ended, row.began)
        self.starved_seconds += max(0.0, min(row.waited, gap) - row.idle)
        self._of_step += _seconds_between(row.began, row.ended)
        if row.num_steps > 0:
            self._recent.append(self._of_step / row.num_steps)
        if row.num_steps != 0:
            self._of_step = 0.0

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _is_past(mark: Mark) -> bool:
    """Whether the device has come to a mark; a CPU's marks are made when it has."""
    return not isinstance(mark, torch.cuda.Event) or mark.query()


def _seconds_between(began: Mark, ended: Mark) -> float:
    """Return the seconds between two marks that are past."""
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(began.elapsed_time(ended)) / 1e3
    return float(ended) - float(began)
