"""The output of a regeneration: JSON lines that survive a kill at any byte.

One append a line, so that a kill can tear the last line alone; opening the file cuts that line
off. A lock keeps a second run away: it would answer the same prompts.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from common.errors import ConfigError
from common.folders import append_whole, cut_torn_line

_SECONDS_BETWEEN_SYNCS = 1.0


class AnswerFile:
    """An open, locked, mended output. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raise `ConfigError` where another run holds the file or a line of it is foreign."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._synced_at = time.monotonic()
        try:
            self._lock()
            cut_torn_line(self._file.fileno())
            self.ids = set(self._read_ids())
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record of what JSON can hold; it outlives this process, and within a second
        the machine."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        append_whole(self._file, line)
        self.ids.add(record["id"])
        if time.monotonic() - self._synced_at > _SECONDS_BETWEEN_SYNCS:
            self._sync()

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sync()
        self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"regeneration.output={str(self._path)!r}: another run is writing it; wait for its "
                f"end or choose another file"
            ) from error

    def _read_ids(self) -> Iterator[str]:
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)["id"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"regeneration.output={str(self._path)!r} line {number}: got no record with "
                        f"an id, expected what an earlier run wrote; choose another file"
                    ) from error
