"""What a target or a worker did over the last seconds: the share spent waiting, and its rate."""

from collections import deque
from dataclasses import dataclass

from common.contracts.control_messages import ServiceHeartbeat, TargetReport, WorkerReport

_WINDOW_SECONDS = 30.0
_LEAST_SECONDS = 2.0
RATED_PHASES = ("running", "waiting", "measuring", "saving")


@dataclass(frozen=True)
class _Reading:
    at: float
    waited_seconds: float
    """Blocked or starved until then."""
    num_tokens: int
    """Captured or trained until then."""


class Window:
    """Readings of heartbeats, while the service runs, none older than the window."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def note(self, now: float, beat: ServiceHeartbeat) -> None:
        """Add a heartbeat, and forget what is older than the window."""
        report, readings = beat.report, self._readings
        if beat.phase not in RATED_PHASES:
            readings.clear()
        elif isinstance(report, TargetReport):
            readings.append(_Reading(now, report.blocked_seconds, report.captured_tokens))
        elif isinstance(report, WorkerReport):
            readings.append(_Reading(now, report.starved_seconds, report.trained_tokens))
        while readings and readings[0].at < now - _WINDOW_SECONDS:
            readings.popleft()

    @property
    def wait_share(self) -> float | None:
        """Share of the time spent waiting; None where too little has been seen."""
        seconds = self._seconds
        if seconds < _LEAST_SECONDS:
            return None
        waited = self._readings[-1].waited_seconds - self._readings[0].waited_seconds
        return min(1.0, max(0.0, waited / seconds))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second, waits included; None where too little has been seen."""
        seconds = self._seconds
        if seconds < _LEAST_SECONDS:
            return None
        return max(0, self._readings[-1].num_tokens - self._readings[0].num_tokens) / seconds

    @property
    def _seconds(self) -> float:
        return self._readings[-1].at - self._readings[0].at if self._readings else 0.0
