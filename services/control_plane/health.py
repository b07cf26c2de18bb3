"""Judges what a registry has seen: who is silent or stalled, and which side holds the run back.

Pure functions of numbers; nothing here knows the time or a lock.
"""

from collections.abc import Sequence
from typing import Literal

from common.contracts.control_messages import Phase

Condition = Literal["ok", "silent", "stalled", "ended", "failed"]
BottleneckName = Literal["target", "drafter", "transport", "unknown"]

# The second missed heartbeat is due two intervals after the last one; half of one is for delay.
_SILENT_INTERVALS = 2.5
_STALLED_MEDIAN_STEPS = 10.0
# Seconds without progress that a phase may take. Phases that are not here may take for ever.
_ALLOWED_SECONDS: dict[Phase, float] = {
    "starting": 120.0,
    "loading": 900.0,
    "compiling": 1200.0,
    "running": 180.0,  # a graph may be compiled again meanwhile
    "waiting": 600.0,
    "measuring": 3600.0,
    "saving": 900.0,
    "draining": 300.0,
}
# While nothing is known of how long a unit of work takes: a first step may also compile.
_FIRST_SECONDS = 1200.0
# Shares of the time spent waiting: below the first a side does not wait, and two sides over the
# second wait for rows that are neither made nor trained, so they are on their way.
_WAITS_SHARE = 0.05
_WAITS_MUCH_SHARE = 0.25


def is_silent(age_seconds: float, heartbeat_seconds: float) -> bool:
    """Say whether two heartbeats have been missed."""
    return age_seconds > _SILENT_INTERVALS * heartbeat_seconds


def is_stalled(
    phase: Phase,
    progress_age_seconds: float,
    pace_seconds: float | None,
    wait_share: float | None,
) -> bool:
    """Say whether progress is overdue; who waits for a peer gets the allowance of waiting.

    Args:
        pace_seconds: median time of a unit of work; None where none has been seen.
    """
    allowed = _ALLOWED_SECONDS.get("waiting" if waits_for_peers(phase, wait_share) else phase)
    if allowed is None:
        return False
    if pace_seconds is not None:
        allowed = max(allowed, _STALLED_MEDIAN_STEPS * pace_seconds)
    elif phase == "running":
        allowed = max(allowed, _FIRST_SECONDS)
    return progress_age_seconds > allowed


def waits_for_peers(phase: Phase, wait_share: float | None) -> bool:
    """Say whether a target that is blocked, or a worker that starves, has nothing else to do."""
    return phase == "waiting" or (
        phase == "running" and wait_share is not None and wait_share > 0.5
    )


def find_bottleneck(
    blocked_shares: Sequence[float], starved_shares: Sequence[float]
) -> tuple[BottleneckName, str]:
    """Return what holds the run back, and why, from the shares of time spent waiting."""
    if not blocked_shares or not starved_shares:
        return "unknown", "needs a target and a worker that have run for a few seconds"
    blocked = sum(blocked_shares) / len(blocked_shares)
    starved = sum(starved_shares) / len(starved_shares)
    figures = f"target blocked {blocked:.0%}, drafter starved {starved:.0%} of the time"
    if min(blocked, starved) >= _WAITS_MUCH_SHARE:
        return "transport", f"{figures}: both wait while rows are between them"
    if max(blocked, starved) < _WAITS_SHARE:
        return "unknown", f"{figures}: neither waits for the other"
    if blocked > starved:
        return "drafter", f"{figures}: rows are made faster than they are trained"
    return "target", f"{figures}: rows are trained faster than they are made"
