"""Which targets a worker waits for, and when it has waited too long.

A target that is slow or dead holds nobody up: a worker ends for want of one only where no other
target is left that may still give rows.
"""

import json
import logging
from pathlib import Path

from common.contracts.sequences import Shard
from common.errors import PeerLostError
from common.lifecycle import lock_holder
from common.ring.worker_rings import WorkerRings

SILENCE_SECONDS = 5.0
# A target that starts beside this worker has its lock by then.
START_SECONDS = 10.0
_log = logging.getLogger(__name__)


class TargetWatch:
    """Looks after targets that do not answer."""

    def __init__(self, run_directory: Path, rings: WorkerRings, timeout_seconds: float) -> None:
        self._directory = run_directory
        self._rings = rings
        self._timeout = timeout_seconds

    def check(self) -> None:
        """Let go of targets that have ended; raise `PeerLostError` where no other gives rows."""
        for ring in self._rings.unfinished():
            patience = START_SECONDS if ring.known_schema is None else SILENCE_SECONDS
            if ring.silent_seconds > patience and stream_is_over(self._directory, ring.shard):
                _log.info("target %d has ended and its rows are trained", ring.shard.index)
                self._rings.end_ring(ring)
        rings = self._rings.unfinished()
        lost = [ring for ring in rings if ring.silent_seconds > self._timeout]
        if lost and not any(ring not in lost and not ring.is_settled for ring in rings):
            raise PeerLostError(
                f"target {', '.join(str(ring.shard.index) for ring in lost)}: nothing heard for "
                f"{min(ring.silent_seconds for ring in lost):.0f} s, expected at most "
                f"{self._timeout:g}; see its log, or raise training.target_timeout_seconds"
            )


def stream_is_over(run_directory: Path, shard: Shard) -> bool:
    """Whether a target server has ended with every row committed: nothing is left to train."""
    stem = run_directory / f"target-{shard.index}"
    try:
        summary = json.loads(stem.with_suffix(".summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # Of a run with as many targets: else its rows were others.
    is_same = summary.get("shard") == shard.model_dump()
    is_drained = is_same and bool(summary.get("is_drained"))
    return is_drained and lock_holder(stem.with_suffix(".lock")) is None
