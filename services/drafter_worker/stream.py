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
from common.ring.consumer import RingConsumer
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
        self._told: dict[int, float] = {}
        """How long each target that is silent had been when the log last said so."""

    def check(self) -> None:
        """Let go of targets that have ended; raise `PeerLostError` where no other gives rows."""
        for ring in self._rings.unfinished():
            patience = START_SECONDS if ring.known_schema is None else SILENCE_SECONDS
            if ring.silent_seconds > patience and stream_is_over(self._directory, ring.shard):
                _log.info("target %d has ended and its rows are trained", ring.shard.index)
                self._rings.end_ring(ring)
        rings = self._rings.unfinished()
        for ring in rings:
            self._tell(ring)
        lost = [ring for ring in rings if ring.silent_seconds > self._timeout]
        if lost and not any(ring not in lost and not ring.is_settled for ring in rings):
            raise PeerLostError(
                f"target {', '.join(str(ring.shard.index) for ring in lost)}: nothing heard for "
                f"{min(ring.silent_seconds for ring in lost):.0f} s, expected at most "
                f"{self._timeout:g}; see its log, or raise training.target_timeout_seconds"
            )

    def _tell(self, ring: RingConsumer) -> None:
        """Name a target that the worker waits for, each time that its silence has doubled."""
        index, silence = ring.shard.index, ring.silent_seconds
        patience = START_SECONDS if ring.known_schema is None else SILENCE_SECONDS
        if silence <= patience:
            if self._told.pop(index, None) is not None:
                _log.info("target %d speaks again", index)
        elif silence > 2 * self._told.get(index, 0.0):
            self._told[index] = silence
            _log.warning("waits for %s, silent for %.0f s", self._describe(ring), silence)

    def _describe(self, ring: RingConsumer) -> str:
        """Return who owns a ring, by its lock: its pid, and the last of its rows that are trained."""
        pid = lock_holder(self._directory / f"target-{ring.shard.index}.lock")
        who = f"pid {pid}" if pid is not None else "which has ended: no process holds its lock"
        known = ring.consumed
        last = max((*known.above, known.low - 1))
        if last < 0:
            return f"target {ring.shard.index} ({who}, no row of it trained)"
        return f"target {ring.shard.index} ({who}, last row trained {ring.shard.to_global(last)})"


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
