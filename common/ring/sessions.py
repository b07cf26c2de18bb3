"""Sessions of a ring: one life of a worker process each, as its owner knows them.

A session number is random and never comes back: ended sessions are remembered for the ring_epoch.
"""

from dataclasses import dataclass, field

from common.contracts.sequences import SequenceSet


@dataclass
class Session:
    """One worker's session."""

    worker_id: str
    session: int
    identity: bytes
    group: str
    capacity: int
    number: int
    last_seen: float
    consumed: SequenceSet
    committed: SequenceSet
    owed: set[int] = field(default_factory=set)
    """Lease ids that expired unanswered; the session gets no lease while it owes one (R5)."""

    def accepts(self, number: int) -> bool:
        """Take a message's number; of two messages the later one's capacity and sets count."""
        if number <= self.number:
            return False
        self.number = number
        return True


class SessionTable:
    """Live sessions by number, and the numbers of ended ones."""

    def __init__(self) -> None:
        self._live: dict[int, Session] = {}
        self._ended: set[int] = set()

    def get(self, session: int) -> Session | None:
        """Return a live session."""
        return self._live.get(session)

    def has_ended(self, session: int) -> bool:
        """Whether the number belonged to a session that is over."""
        return session in self._ended

    def add(self, entry: Session) -> None:
        """Begin a session."""
        self._live[entry.session] = entry

    def end(self, session: int) -> Session | None:
        """End a session and remember its number."""
        self._ended.add(session)
        return self._live.pop(session, None)

    def of_worker(self, worker_id: str) -> Session | None:
        """Return the live session of a worker."""
        return next((entry for entry in self._live.values() if entry.worker_id == worker_id), None)

    def of_group(self, group: str) -> list[Session]:
        """Return the live sessions of a group, the one seen longest ago first."""
        return [entry for entry in self._live.values() if entry.group == group]

    def silent_since(self, moment: float) -> list[Session]:
        """Return live sessions not heard of since `moment`."""
        return [entry for entry in self._live.values() if entry.last_seen < moment]

    def __len__(self) -> int:
        return len(self._live)
