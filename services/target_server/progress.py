"""Progress of long work on stderr: a live bar on a terminal, a plain line now and then elsewhere."""

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts finished items and tokens, and shows both with tokens a second."""

    def __init__(self, name: str, total: int | None) -> None:
        """`total` is None where nobody knows it."""
        self._name, self._total = name, total
        self._items = self._tokens = 0
        self._start = self._last_line = time.monotonic()
        self._bar = _bar(name) if sys.stderr.isatty() else None

    def advance(self, items: int, tokens: int) -> None:
        """Add finished items and the tokens they took."""
        self._items += items
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=items, rate=self.rate())
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._write_line()

    def rate(self) -> float:
        """Return tokens a second since the start."""
        return self._tokens / max(time.monotonic() - self._start, 1e-9)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._name, total=self._total, rate=0.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._write_line()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        _log.info(
            "%s: %d of %s, %d tokens, %.0f tokens/s",
            self._name, self._items, self._total or "?", self._tokens, self.rate(),
        )  # fmt: skip


def _bar(name: str) -> Bar:
    return Bar(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
