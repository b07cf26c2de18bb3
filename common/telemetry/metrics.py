"""Training curves as JSON lines: one object a line, flushed, readable while the run goes on."""

import json
import time
from pathlib import Path
from types import TracebackType


class MetricsLog:
    """Appends records to one file. `write` is called once a log interval, never in a hot loop."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, **values: object) -> None:
        """Append one record with its time and step."""
        self._file.write(json.dumps({"time": time.time(), "step": step, **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
