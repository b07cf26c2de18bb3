"""Learning rate over the course of a run. Pure."""

import math

from services.drafter_worker.config import OptimizerTable


class Schedule:
    """Warm-up, then cosine to zero or constant; by steps, or by how far the stream has come."""

    def __init__(self, table: OptimizerTable, total_rows: int | None) -> None:
        self._table = table
        self._total = table.schedule_steps or total_rows or 0

    def at(self, step: int, sequence: int) -> float:
        """Return the learning rate of the step that ends with the row `sequence`."""
        table = self._table
        if not self._total:
            return table.learning_rate
        done = step if table.schedule_steps else sequence
        progress = min(1.0, (done + 1) / self._total)
        if progress < table.warmup_ratio:
            return table.learning_rate * progress / table.warmup_ratio
        if table.schedule == "constant":
            return table.learning_rate
        rest = (progress - table.warmup_ratio) / (1 - table.warmup_ratio)
        return table.learning_rate * 0.5 * (1 + math.cos(math.pi * rest))
