"""Shows a run's progress on stderr: a live bar on a terminal, else a plain line now and then."""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.launcher.rundir import control_url

_FETCH_SECONDS = 0.5
_TIMEOUT_SECONDS = 2.0
_LINE_SECONDS = 5.0
_ENDS = ("consumed", "skipped", "poison")
# A loaded machine is late with some heartbeats; and a process that ends is told by who started it.
_SILENCE_SECONDS = 10.0
# A run's control plane is on this machine: a proxy that the environment names does not reach it.
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class StatusFeed:
    """Fetches a run's /status in a thread of its own, since the control plane may be down."""

    def __init__(self, directory: Path) -> None:
        self.latest: dict[str, Any] | None = None
        self.is_answered = False
        """Whether the last fetch brought `latest`."""
        self.directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-feed", daemon=True)

    def __enter__(self) -> "StatusFeed":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_TIMEOUT_SECONDS)

    def overdue(self) -> list[dict[str, Any]]:
        """Return who is silent or stalled by what has just been heard; nobody where nobody answers."""
        return list(self.latest["overdue"]) if self.latest and self.is_answered else []

    def _run(self) -> None:
        while True:
            self.fetch()
            if self._stop.wait(_FETCH_SECONDS):
                return

    def fetch(self) -> None:
        """Ask once; what was seen before stays where nobody answers."""
        status = fetch_status(self.directory)
        self.latest, self.is_answered = status or self.latest, status is not None


class ProgressView:
    """Draws the feed's figures; `say` prints a line that stays."""

    def __init__(self, feed: StatusFeed) -> None:
        self._feed = feed
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._is_terminal = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("rows, {task.fields[figures]}"), TimeElapsedColumn(),
            console=self._console, disable=not self._is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("waiting", total=None, figures="")
        self._last_line = ""
        self._has_address = False
        self._overdue: dict[tuple[str, int], str] = {}
        """Condition of each overdue service that was named, by instance and pid."""
        self._line_at = 0.0

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True)

    def update(self) -> None:
        """Draw what the feed has last seen."""
        status = self._feed.latest
        if status is None:
            return
        if not self._has_address:
            self._has_address = True
            self.say(f"status at {control_url(self._feed.directory)}/status")
        self._name_overdue(status["overdue"])
        done, total = rows_trained(status), status["target"]["total_rows"]
        figures = describe(status)
        self._bar.update(self._task, description=status["run"]["state"], completed=done,
                         total=total, figures=figures)  # fmt: skip
        if not self._is_terminal:
            self._print_line(f"{status['run']['state']}: {done}/{total or '?'} rows, {figures}")

    def _name_overdue(self, overdue: list[dict[str, Any]]) -> None:
        """Say once of each who is stalled or silent, and when that is over."""
        late = {
            (entry["instance"], entry["pid"]): entry
            for entry in overdue
            if entry["condition"] == "stalled" or entry["age_seconds"] >= _SILENCE_SECONDS
        }
        for key, entry in late.items():
            if self._overdue.get(key) != entry["condition"]:
                self._overdue[key] = entry["condition"]
                self.say(
                    f"{entry['text']}; what it does: ringdraft stacks {entry['instance']} "
                    f"--run {self._feed.directory}"
                )
        for key in set(self._overdue) - set(late):
            self.say(f"{key[0]} (pid {key[1]}) is no longer {self._overdue.pop(key)}")

    def _print_line(self, line: str) -> None:
        now = time.monotonic()
        if line != self._last_line and now - self._line_at >= _LINE_SECONDS:
            self._last_line, self._line_at = line, now
            self.say(line)


def fetch_status(directory: Path) -> dict[str, Any] | None:
    """Return the run's status, or None while no control plane answers."""
    url = control_url(directory)
    if url is None:
        return None
    try:
        with open_url(f"{url}/status", timeout=_TIMEOUT_SECONDS) as answer:
            status = json.load(answer)
    except (OSError, ValueError):  # URLError and timeouts are OSErrors
        return None
    return status if isinstance(status, dict) and status.get("schema_version") == 1 else None


def _range(values: list[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:.3f}" if least == most else f"{least:.3f} to {most:.3f}"


def rows_trained(status: dict[str, Any]) -> int:
    """Return the distinct rows that the group which is behind is through with."""
    return min(map(_distinct_rows, status["groups"]), default=0)


def _distinct_rows(group: dict[str, Any]) -> int:
    """The ring's owner counts each row once; workers count what they did."""
    account = group["account"]
    ends = (*_ENDS, "settled_before")  # a target that was started again goes on from there
    return sum(account[end] for end in ends) if account else group["trained_rows"]


def describe(status: dict[str, Any]) -> str:
    """Return the figures of a run in one line."""
    groups = status["groups"]
    losses = [group["loss"] for group in groups if group["loss"] is not None]
    parts = [
        f"target {status['target']['tokens_per_second']:.0f} tok/s",
        f"drafter {sum(group['tokens_per_second'] for group in groups):.0f} tok/s",
        *([f"loss {_range(losses)}"] if losses else []),
    ]
    if status["bottleneck"]["name"] != "unknown":
        parts.append(f"bottleneck {status['bottleneck']['name']}")
    if not status["is_ready"] and status["run"]["state"] == "starting":
        parts.append(status["not_ready_reason"])
    return ", ".join(parts)
