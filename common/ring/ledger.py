"""What is trained (rule R8): sequences of a group from publish to a durable checkpoint.

RELEASE frees memory and says nothing here. A sequence leaves the ledger when a commit lists it, or
when it was skipped or is poison. What an ended session had released and its successor's HELLO (or,
without a successor, its last commit) lacks is to be captured again under the same sequence.
"""

from collections import Counter, deque

from common.contracts.sequences import SequenceSet


class GroupLedger:
    """One group's sequences that are published and not settled."""

    def __init__(self, settled: SequenceSet) -> None:
        self._open: dict[int, int | None] = {}
        """Sequence to the session that released it; None while it is in the ring or awaited."""
        self._above = set(settled.above)
        self._low = settled.low
        self._committed = 0
        self._recaptures: deque[int] = deque()
        self._awaited: set[int] = set()
        """Sequences in `_recaptures`, or taken from it and not published again yet."""
        self.counts: Counter[str] = Counter()

    @property
    def settled(self) -> SequenceSet:
        """Sequences that are committed, skipped or poison."""
        return SequenceSet(low=self._low, above=tuple(sorted(self._above)))

    @property
    def settled_below(self) -> int:
        """Every sequence under this one is settled."""
        return self._low

    @property
    def num_committed(self) -> int:
        """Distinct sequences that commits listed."""
        return self._committed

    @property
    def num_open(self) -> int:
        """Published sequences that are not settled."""
        return len(self._open)

    @property
    def num_awaited(self) -> int:
        """Sequences that are to be captured again."""
        return len(self._awaited)

    def lacks(self, sequence: int) -> bool:
        """Whether the group still needs the sequence published, for the first time or again."""
        if sequence in self._open:
            return sequence in self._awaited
        return not self._is_settled(sequence)

    def publish(self, sequence: int) -> None:
        """Open a sequence."""
        self._awaited.discard(sequence)
        self.counts["recaptured"] += sequence in self._open
        self._open[sequence] = None

    def release(self, sequence: int, session: int) -> None:
        """Note which session holds the row from here on."""
        if sequence in self._open:
            self._open[sequence] = session

    def drop(self, sequence: int) -> None:
        """Settle a sequence that was skipped or is poison."""
        if self._open.pop(sequence, self) is not self:
            self._settle(sequence)

    def commit(self, session: int, committed: SequenceSet) -> None:
        """Settle what a session's durable checkpoint lists."""
        above = frozenset(committed.above)
        done = [
            sequence
            for sequence, holder in self._open.items()
            if holder == session and (sequence < committed.low or sequence in above)
        ]
        for sequence in done:
            del self._open[sequence]
            self._settle(sequence)
        self._committed += len(done)

    def num_consumed(self, consumed: dict[int, SequenceSet]) -> int:
        """Return committed plus open sequences that a live session has consumed."""
        done = sum(
            holder is not None and holder in consumed and sequence in consumed[holder]
            for sequence, holder in self._open.items()
        )
        return self._committed + done

    def hand_over(self, ended: int, successor: int, kept: SequenceSet) -> None:
        """Give an ended session's rows to its successor; await those that it lacks."""
        for sequence in self._held_by(ended):
            if sequence in kept:
                self._open[sequence] = successor
            else:
                self._await(sequence)

    def lose(self, ended: int) -> None:
        """Await every uncommitted row of a session that has no successor."""
        for sequence in self._held_by(ended):
            self._await(sequence)

    def adopt(self, session: int, consumed: SequenceSet) -> None:
        """Cancel what a session that came back late had consumed after all."""
        for sequence in [s for s in self._recaptures if s in consumed]:
            self._recaptures.remove(sequence)
            self._awaited.discard(sequence)
            self._open[sequence] = session

    def next_recapture(self) -> int | None:
        """Return a sequence to capture again, or None."""
        return self._recaptures.popleft() if self._recaptures else None

    def _held_by(self, session: int) -> list[int]:
        return [sequence for sequence, holder in self._open.items() if holder == session]

    def _await(self, sequence: int) -> None:
        self._open[sequence] = None
        self._awaited.add(sequence)
        self._recaptures.append(sequence)

    def _is_settled(self, sequence: int) -> bool:
        return sequence < self._low or sequence in self._above

    def _settle(self, sequence: int) -> None:
        self._above.add(sequence)
        while self._low in self._above:
            self._above.remove(self._low)
            self._low += 1
