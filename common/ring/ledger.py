"""What is trained (rule R8): sequences of a group from publish to a durable checkpoint.

RELEASE frees memory and says nothing here. A sequence leaves the ledger when a commit lists it, or
when it was skipped or is poison. What an ended session had released and its successor's HELLO (or,
without a successor, its last commit) lacks is to be captured again under the same sequence.

A restarted owner knows checkpoints only. What live sessions say they hold beyond those is opened in
their name when it is asked for (`adopted`), and never published unless they lose it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from common.contracts.sequences import SequenceSet

_NOTHING = SequenceSet()


class GroupLedger:
    """One group's sequences that are open: published or adopted, and not settled."""

    def __init__(self, settled: SequenceSet) -> None:
        known = SequenceSet.of(settled.above, low=settled.low)
        self._low, self._above = known.low, set(known.above)
        self._open: dict[int, int | None] = {}
        """Sequence to the session that released it; None while it is in the ring or awaited."""
        self._held: defaultdict[int, set[int]] = defaultdict(set)
        """The same by session."""
        self._claims: dict[int, SequenceSet] = {}
        """What sessions said at their Hello that they hold."""
        self._durable: dict[int, SequenceSet] = {}
        """What their newest checkpoints hold; heartbeats repeat it unchanged most of the time."""
        self._adopted: set[int] = set()
        """Open sequences that this owner has not published."""
        self._awaited: set[int] = set()
        self._recaptures: dict[int, None] = {}
        """Awaited sequences that nobody captures yet, in order."""
        self._num_committed = 0
        self._num_before = known.low + len(known.above)
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
        """Distinct sequences of this owner that commits listed."""
        return self._num_committed

    @property
    def num_settled_before(self) -> int:
        """Distinct sequences that earlier owners published, and that are settled."""
        return self._num_before

    @property
    def num_open(self) -> int:
        """Sequences that this owner published and that are not settled."""
        return len(self._open) - len(self._adopted)

    @property
    def num_awaited(self) -> int:
        """Sequences that are to be captured again."""
        return len(self._awaited)

    def awaited(self) -> list[int]:
        """Return the sequences that are to be captured again."""
        return sorted(self._awaited)

    def is_clear(self) -> bool:
        """Whether nothing is open."""
        return not self._open

    def holds_for(self, session: int) -> bool:
        """Whether rows wait for the fate of a session."""
        return session in self._held or session in self._claims

    def lacks(self, sequence: int) -> bool:
        """Whether the group still needs the sequence published, for the first time or again."""
        if sequence in self._open:
            return sequence in self._awaited
        if sequence < self._low or sequence in self._above:
            return False
        for session, claim in self._claims.items():
            if sequence in claim:
                self._adopted.add(sequence)
                self._hold(sequence, session)
                return False
        return True

    def publish(self, sequence: int) -> None:
        """Open a sequence, or open it again."""
        self._stop_awaiting(sequence)
        if sequence in self._adopted:
            self._adopted.remove(sequence)
        elif sequence in self._open:
            self.counts["recaptured"] += 1
        self._hold(sequence, None)

    def release(self, sequence: int, session: int) -> None:
        """Note which session holds the row from here on."""
        if sequence in self._open:
            self._hold(sequence, session)

    def drop(self, sequence: int) -> None:
        """Settle a sequence that was skipped or is poison."""
        if sequence in self._open:
            self._settle(sequence)

    def commit(self, session: int, committed: SequenceSet) -> None:
        """Settle what a session's durable checkpoint lists, now and as its releases come in."""
        if self._durable.get(session) == committed:
            return
        self._durable[session] = committed
        for sequence in [s for s in self._held.get(session, ()) if s in committed]:
            self._commit(sequence)

    def num_consumed(self, consumed: Mapping[int, SequenceSet]) -> int:
        """Return committed plus open sequences that a live session has consumed."""
        return self._num_committed + sum(
            sequence in done and sequence not in self._adopted
            for session, done in consumed.items()
            for sequence in self._held.get(session, ())
        )

    def welcome(self, session: int, held: SequenceSet) -> None:
        """Note what a session says it holds; of what was lost, it keeps what it has after all."""
        if held.low or held.above:
            self._claims[session] = held
        for sequence in [s for s in self._awaited if s in held]:
            self._stop_awaiting(sequence)
            self._hold(sequence, session)

    def lose(self, ended: int) -> None:
        """Await every uncommitted row of an ended session; a successor's `welcome` keeps its own."""
        for sequence in self._leave(ended):
            self._await(sequence)

    def next_recapture(self) -> int | None:
        """Return a sequence to capture again, or None."""
        sequence = next(iter(self._recaptures), None)
        if sequence is not None:
            del self._recaptures[sequence]
        return sequence

    def is_captured_elsewhere(self, sequence: int) -> None:
        """The sequence is being captured for another group already: it comes to this one too."""
        self._recaptures.pop(sequence, None)

    def _leave(self, session: int) -> list[int]:
        self._claims.pop(session, None)
        self._durable.pop(session, None)
        return sorted(self._held.get(session, ()))

    def _hold(self, sequence: int, session: int | None) -> None:
        if self._open.get(sequence) is not None:
            self._let_go(sequence)
        self._open[sequence] = session
        if session is None:
            return
        self._held[session].add(sequence)
        if sequence in self._durable.get(session, _NOTHING):
            self._commit(sequence)

    def _commit(self, sequence: int) -> None:
        is_mine = sequence not in self._adopted
        self._num_committed += is_mine
        self._num_before += not is_mine
        self._settle(sequence)

    def _let_go(self, sequence: int) -> None:
        holder = self._open.get(sequence)
        if holder is not None:
            self._held[holder].remove(sequence)
            if not self._held[holder]:
                del self._held[holder]

    def _await(self, sequence: int) -> None:
        self._hold(sequence, None)
        self._awaited.add(sequence)
        self._recaptures[sequence] = None

    def _stop_awaiting(self, sequence: int) -> None:
        if sequence in self._awaited:
            self._awaited.remove(sequence)
            self._recaptures.pop(sequence, None)

    def _settle(self, sequence: int) -> None:
        self._let_go(sequence)
        del self._open[sequence]
        self._stop_awaiting(sequence)
        self._adopted.discard(sequence)
        self._above.add(sequence)
        while self._low in self._above:
            self._above.remove(self._low)
            self._low += 1
