"""The target server's loop.

conversations -> packed rows -> target forward -> slot -> announce -> lease
     (RecipeBook)               (Capture)         (Announcer)  (RingOwner: a thread each)

consumes  conversations, and sequences to be captured again
produces  published rows
waits for a free slot (bounded)          unblocked by  a release, a dead session, a stop
waits for every group's commits at the end, to capture again what a dead worker had taken
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.contracts.control_messages import Command, Phase, TargetReport
from common.disk import write_with_patience
from common.lifecycle import write_atomically
from common.ring.owner import RingOwner, WritableSlot
from common.telemetry.control_link import ServiceState
from services.target_server.announcer import Announcer
from services.target_server.capture import Capture
from services.target_server.checks import TargetChecks
from services.target_server.packing import PackedRow
from services.target_server.recipes import RecipeBook

LOAN_SECONDS = 0.2
IDLE_SECONDS = 0.05
_log = logging.getLogger(__name__)


class TargetServer:
    """Captures rows and publishes them until the stream is drained or a stop is asked for."""

    def __init__(
        self,
        *,
        target: str,
        recipes: RecipeBook,
        capture: Capture,
        announcer: Announcer,
        ring: RingOwner,
        checks: TargetChecks,
        total_rows: int | None,
        tags: tuple[str, ...],
        skipped_samples: Callable[[], dict[str, int]],
        summary: Path,
        stop: threading.Event,
    ) -> None:
        self._target = target
        self._recipes = recipes
        self._capture = capture
        self._announcer = announcer
        self._ring = ring
        self._checks = checks
        self._total_rows = total_rows
        self._tags = tags
        self._skipped_samples = skipped_samples
        self._summary = summary
        self._stop = stop
        self._paused = threading.Event()
        self._capture_seconds = 0.0
        self._blocked_seconds = 0.0
        self._started_at = time.monotonic()
        self.phase: Phase = "running"

    def run(self) -> None:
        """Publish every row, then serve until each is committed."""
        while not self._stop.is_set() and not self._ring.is_drained():
            row = None if self._paused.is_set() else self._recipes.next_row()
            if row is None:
                self._idle()
                continue
            slot = self._loan()
            if slot is None:
                break
            self._capture_into(slot, row)
        self._announcer.close()
        self._announcer.raise_failure()
        self._write_summary()
        self.phase = "done"

    def describe(self) -> ServiceState:
        """Return the server's state for the control plane."""
        seconds = time.monotonic() - self._started_at
        report = TargetReport(
            target=self._target,
            total_rows=self._total_rows,
            captured_tokens=self._announcer.num_tokens,
            capture_seconds=self._capture_seconds,
            blocked_seconds=self._blocked_seconds,
            tokens_per_second=self._announcer.num_tokens / seconds if seconds > 0 else 0.0,
            skipped_samples=self._skipped_samples(),
            captured_tokens_by_tag=self._tokens_by_tag(),
            checks=self._checks.results,
            ring=self._ring.report(),
        )
        return ServiceState(
            self.phase, f"row {self._recipes.last_sequence}", self._announcer.num_rows, report
        )

    def obey(self, command: Command) -> None:
        """Note a command of the control plane."""
        if command.name == "stop":
            self._stop.set()
        elif command.name == "pause":
            self._paused.set()
        elif command.name == "resume":
            self._paused.clear()

    def _idle(self) -> None:
        self._announcer.raise_failure()
        if self._paused.is_set():
            self.phase = "paused"
        elif self._recipes.has_ended and not self._stop.is_set():  # a stop ends rows early
            self._ring.end(self._recipes.last_sequence)
            self.phase = "draining"
        self._stop.wait(IDLE_SECONDS)

    def _loan(self) -> WritableSlot | None:
        """Wait for a slot while the ring is full; None on a stop request."""
        start = time.monotonic()
        slot = None
        while slot is None and not self._stop.is_set():
            slot = self._ring.loan(LOAN_SECONDS)
        self._blocked_seconds += time.monotonic() - start
        self.phase = "running"
        return slot

    def _capture_into(self, slot: WritableSlot, row: PackedRow) -> None:
        start = time.monotonic()
        try:
            copies = self._capture.write(row, slot)
        except BaseException:
            slot.abort()
            raise
        self._announcer.submit(slot, row, copies)
        self._capture_seconds += time.monotonic() - start

    def _tokens_by_tag(self) -> dict[str, int]:
        # A copy: the announcer's thread goes on counting.
        return {self._tags[tag]: n for tag, n in dict(self._announcer.tokens_by_tag).items()}

    def _write_summary(self) -> None:
        report = self._ring.report()
        content = {
            "shard": report.shard.model_dump(),
            "groups": {account.group: summarise(account.model_dump()) for account in report.groups},
            "is_drained": self._ring.is_drained(),
            "captured_tokens": self._announcer.num_tokens,
            "capture_seconds": self._capture_seconds,
            "blocked_seconds": self._blocked_seconds,
            "skipped_samples": self._skipped_samples(),
            "captured_tokens_by_tag": self._tokens_by_tag(),
            "checks": self._checks.results,
        }
        write = partial(write_atomically, self._summary, json.dumps(content))
        write_with_patience(write, self._stop)


def summarise(account: dict[str, int]) -> dict[str, int]:
    """Return distinct rows of a group: published, trained (in durable weights), and what is left.

    `rows_before` are those that earlier target servers of the run published, also in no other figure.
    `rows_open` are known and untrained (a run that was stopped early); `rows_lost` are in no
    account at all.
    """
    distinct = account["published"] - account["recaptured"]
    settled = account["committed"] + account["skipped"] + account["poison"]
    return {
        "rows_published": distinct,
        "rows_trained": account["committed"],
        "rows_before": account["settled_before"],
        "rows_open": account["open"],
        "rows_skipped": account["skipped"],
        "rows_poison": account["poison"],
        "rows_lost": distinct - settled - account["open"],
        "requeued": account["requeued"],
        "recaptured": account["recaptured"],
    }
