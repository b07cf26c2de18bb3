"""Sets of sequence numbers as a low watermark and exceptions (rule R8)."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from common.contracts.record import Record

Sequence = Annotated[int, Field(ge=0)]


class SequenceSet(Record):
    """Every sequence below `low`, and those in `above` (sorted, all at or over `low`)."""

    low: Sequence = 0
    above: tuple[Sequence, ...] = ()

    def __contains__(self, sequence: int) -> bool:
        return sequence < self.low or sequence in self.above

    @classmethod
    def of(cls, sequences: Iterable[int], low: int = 0) -> "SequenceSet":
        """Return the compact form of `sequences` together with all below `low`."""
        above = sorted({sequence for sequence in sequences if sequence >= low})
        count = 0
        while count < len(above) and above[count] == low + count:
            count += 1
        return cls(low=low + count, above=tuple(above[count:]))

    def members_from(self, start: int, stop: int) -> set[int]:
        """Return the members in [start, stop)."""
        below = set(range(start, min(self.low, stop)))
        return below | {sequence for sequence in self.above if start <= sequence < stop}

    def union(self, other: "SequenceSet") -> "SequenceSet":
        """Return what is in either set."""
        return SequenceSet.of((*self.above, *other.above), low=max(self.low, other.low))
