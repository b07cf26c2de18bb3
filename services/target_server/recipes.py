"""Which row comes next, and how to make a row again (rule R8).

Fresh rows come in the order of a deterministic packing; a row's sequence is its ordinal there. A
row stays here until every group has committed it, so that what a dead worker had taken and not
committed is captured again under the same sequence.
"""

from collections.abc import Iterator
from typing import Protocol

from services.target_server.packing import PackedRow, RecordedRow


class Ledger(Protocol):
    """What the ring knows of sequences."""

    def wants(self, sequence: int) -> bool: ...
    def next_recapture(self) -> int | None: ...
    def settled_below(self) -> int: ...


class RecipeBook:
    """Hands out rows: those to be captured again first, then fresh ones."""

    def __init__(
        self, rows: Iterator[PackedRow | RecordedRow], ledger: Ledger, first_sequence: int = 0
    ) -> None:
        self._rows = rows
        self._ledger = ledger
        self._kept: dict[int, PackedRow | RecordedRow] = {}
        self._forgotten_below = first_sequence
        self.last_sequence = first_sequence - 1
        self.has_ended = False

    def next_row(self) -> PackedRow | None:
        """Return the next row to capture, or None where there is none at the moment."""
        self._forget_settled()
        again = self._ledger.next_recapture()
        if again is not None:
            return self._made(again)
        for row in self._rows:
            self.last_sequence = row.sequence
            # Kept even where a live worker has it already: that worker may die before it commits.
            self._kept[row.sequence] = row
            if self._ledger.wants(row.sequence):
                return self._made(row.sequence)
        self.has_ended = True
        return None

    def _made(self, sequence: int) -> PackedRow | None:
        row = self._kept[sequence]
        if isinstance(row, RecordedRow):
            made = row.make()
            if made is None:
                return None
            row = self._kept[sequence] = made
        return row

    def _forget_settled(self) -> None:
        below = self._ledger.settled_below()
        for sequence in range(self._forgotten_below, below):
            self._kept.pop(sequence, None)
        self._forgotten_below = max(self._forgotten_below, below)
