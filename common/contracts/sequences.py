"""Sequence numbers: sets of them (rule R8), and how the rings of a run share them out."""

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


class Shard(Record):
    """Which rows of a run one ring carries: those with `sequence % count == index`.

    A ring numbers its own rows from 0 without gaps, so that low watermarks close over them. These
    local numbers are on the wire and in the slots of that ring; everywhere else a sequence is the
    row's ordinal in the run.
    """

    index: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Shard":
        if self.index >= self.count:
            raise ValueError(f"got index {self.index}, expected one below {self.count}")
        return self

    def __str__(self) -> str:
        return f"{self.index} of {self.count}"

    def holds(self, sequence: int) -> bool:
        """Whether a row is of this ring."""
        return sequence % self.count == self.index

    def to_local(self, sequence: int) -> int:
        """Return a row's number in this ring; raise `ValueError` where another ring carries it."""
        if not self.holds(sequence):
            raise ValueError(f"row {sequence} is not of ring {self}")
        return sequence // self.count

    def to_global(self, local: int) -> int:
        """Return the sequence of the ring's row number `local`."""
        return local * self.count + self.index

    def num_below(self, sequence: int) -> int:
        """Return how many of the ring's rows come before a sequence."""
        return max(0, -((self.index - sequence) // self.count))

    def local_set(self, known: SequenceSet) -> SequenceSet:
        """Return the ring's part of a set of sequences, in the ring's own numbers."""
        above = (self.to_local(sequence) for sequence in known.above if self.holds(sequence))
        return SequenceSet.of(above, low=self.num_below(known.low))


ONE_RING = Shard()
"""Of a run that has a single ring."""


def shards_of(count: int) -> tuple[Shard, ...]:
    """Return the shards of a run that has `count` rings."""
    return tuple(Shard(index=index, count=count) for index in range(count))


def merge_local_sets(parts: list[SequenceSet]) -> SequenceSet:
    """Return the sequences that all rings together have; `parts` are their local sets, in order."""
    pairs = list(zip(shards_of(len(parts)), parts, strict=True))
    low = min(shard.to_global(part.low) for shard, part in pairs)
    return SequenceSet.of(
        (
            shard.to_global(local)
            for shard, part in pairs
            for local in (*range(shard.num_below(low), part.low), *part.above)
        ),
        low=low,
    )
