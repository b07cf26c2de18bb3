"""Training curves as JSON lines: one object a line, whole or not there, readable while the run goes on.

A process that goes on from a checkpoint says so in a line of its own, `is_resumed`: what stands above
it with a higher step is of weights that were lost.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from common.folders import append_whole, cut_torn_line
from common.telemetry.trackers import Tracker


class MetricsLog:
    """Appends records to one file, and hands them to trackers. Call it once a log interval."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._trackers = trackers
        cut_torn_line(self._file.fileno())

    def write(self, step: int, **values: object) -> None:
        """Append one record with its time and step; where that fails with `OSError`, nothing of it."""
        record = {"time": time.time(), "step": step, **values}
        append_whole(self._file, json.dumps(record).encode() + b"\n")
        for tracker in self._trackers:
            tracker.log(record)

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
