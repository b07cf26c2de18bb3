"""The state as the routes give it: made at most a few times a second, however many ask.

    request --> Readings --> the last reading, if it is fresh
                         \\-> one of the requests makes the next one; the others wait for it

A reading holds the status and what is made of it, so that any number of scrapes costs what a few
do, and the event loop, which answers /healthz, is left alone.
"""

import threading
import time
from collections.abc import Callable
from functools import cached_property

from services.control_plane.metrics import render
from services.control_plane.status import Status

FRESH_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0


class Reading:
    """A run's state at one moment, in each form that a route gives."""

    def __init__(self, status: Status) -> None:
        self.status = status

    @cached_property
    def status_json(self) -> bytes:
        """The status as JSON; what is not a number becomes null."""
        return self.status.model_dump_json().encode()

    @cached_property
    def metrics(self) -> bytes:
        """The status as Prometheus text."""
        return render(self.status)


class Readings:
    """Makes readings; safe to call from any thread."""

    def __init__(
        self, read_status: Callable[[], Status], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_status = read_status
        self._clock = clock
        self._lock = threading.Lock()
        self._last: Reading | None = None
        self._made_at = 0.0

    def latest(self) -> Reading | None:
        """Return a reading that is fresh; None where none was made within a second."""
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return None
        try:
            if self._last is None or self._clock() - self._made_at >= FRESH_SECONDS:
                self._last = Reading(self._read_status())
                self._made_at = self._clock()
            return self._last
        finally:
            self._lock.release()
