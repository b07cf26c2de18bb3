"""Sets of sequence numbers as a low watermark and exceptions (rule R8)."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, model_validator

from common.contracts.record import Record

Sequence = Annotated[int, Field(ge=0, lt=1 << 64)]


class SequenceSet(Record):
    """Every sequence below `low`, and those in `above` (rising, all at or over `low`)."""

    low: Sequence = 0
    above: tuple[Sequence, ...] = ()

    @model_validator(mode="after")
    def _rises_from_low(self) -> "SequenceSet":
        if list(self.above) != sorted(set(self.above)) or (self.above and self.above[0] < self.low):
            raise ValueError("above must rise, from low on")
        return self

    def __contains__(self, sequence: int) -> bool:
        if sequence < self.low:
            return True
        index = bisect_left(self.above, sequence)
        return index < len(self.above) and self.above[index] == sequence

    @classmethod
    def of(cls, sequences: Iterable[int], low: int = 0) -> "SequenceSet":
        """Return the compact form of `sequences` together with all below `low`."""
        above = sorted({sequence for sequence in sequences if sequence >= low})
        count = 0
        while count < len(above) and above[count] == low + count:
            count += 1
        return cls(low=low + count, above=tuple(above[count:]))

    def lowest(self, count: int) -> "SequenceSet":
        """Return the set without the exceptions behind the first `count`: it may say less."""
        return self if len(self.above) <= count else self.of(self.above[:count], low=self.low)

    def union(self, other: "SequenceSet") -> "SequenceSet":
        """Return what is in either set."""
        return SequenceSet.of((*self.above, *other.above), low=max(self.low, other.low))
