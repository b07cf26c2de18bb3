"""Learning rate over the course of a run. Pure."""

import math

from common.contracts.sequences import SequenceSet, shards_of
from services.drafter_worker.config import OptimizerTable


class Schedule:
    """Warm-up, then one of three shapes; by steps, or by how far the stream has come."""

    def __init__(self, table: OptimizerTable, total_rows: int | None) -> None:
        self._table = table
        self._total = table.schedule_steps or total_rows or 0

    def at(self, step: int, num_rows: int) -> float:
        """Return the learning rate of a step, when the stream has come to its row `num_rows`."""
        table = self._table
        if not self._total:
            return table.learning_rate
        done = step + 1 if table.schedule_steps else num_rows
        progress = min(1.0, done / self._total)
        if progress < table.warmup_ratio:
            return table.learning_rate * progress / table.warmup_ratio
        if table.schedule == "constant":
            return table.learning_rate
        falling = 1 - table.warmup_ratio if table.schedule == "cosine" else table.decay_ratio
        fallen = max(0.0, 1 - (1 - progress) / falling)
        return table.learning_rate * 0.5 * (1 + math.cos(math.pi * fallen))


class StreamPosition:
    """How many rows the stream of a run has come to, as one worker has seen it.

    Rings are not equally fast: of each one the furthest row counts, so that a schedule which
    follows the stream neither jumps between them nor goes back for a row that comes again.
    """

    def __init__(self, num_rings: int, consumed: SequenceSet) -> None:
        self._shards = shards_of(num_rings)
        known = [shard.local_set(consumed) for shard in self._shards]
        self._reached = [part.above[-1] + 1 if part.above else part.low for part in known]

    def reach(self, sequence: int) -> None:
        """A row has come."""
        index = sequence % len(self._reached)
        local = self._shards[index].to_local(sequence)
        self._reached[index] = max(self._reached[index], local + 1)

    @property
    def num_rows(self) -> int:
        """Rows of all rings up to the furthest of each."""
        return sum(self._reached)
