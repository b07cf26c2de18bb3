"""Sessions of a ring: one life of a worker process each, as its owner knows them.

A session number is random and never comes back: ended sessions are remembered for the ring_epoch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from common.contracts.sequences import SequenceSet
from common.ring.book import Delivery, SlotBook


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
    last_lease_id: int = 0
    """The newest lease it was granted: of equals, who has waited longest comes first."""
    owed: set[int] = field(default_factory=set)
    """Lease ids that expired unanswered; the session gets no lease while it owes one (R5)."""

    def accepts(self, number: int) -> bool:
        """Take a message's number; of two messages the later one's capacity and sets count."""
        if number <= self.number:
            return False
        self.number = number
        return True


Member = tuple[int, int, Session]
"""A session that may get a lease: how many it has, its newest one, the session."""
_LOAD_AND_TURN = itemgetter(0, 1)


@dataclass
class Estate:
    """An ended session whose rows wait for its worker's next session (R8)."""

    session: int
    worker_id: str
    group: str
    deadline: float


class SessionTable:
    """Live sessions by number, the worker ids of ended ones, and what those left behind."""

    def __init__(self) -> None:
        self._live: dict[int, Session] = {}
        self._members: defaultdict[str, list[Session]] = defaultdict(list)
        """The same by group."""
        self._ended: dict[int, str] = {}
        self._estates: list[Estate] = []

    def get(self, session: int) -> Session | None:
        """Return a live session."""
        return self._live.get(session)

    def has_ended(self, session: int) -> bool:
        """Whether the number belonged to a session that is over."""
        return session in self._ended

    def is_replaced(self, session: int) -> bool:
        """Whether a session is over and its worker id speaks through another one by now."""
        worker_id = self._ended.get(session)
        return worker_id is not None and self.of_worker(worker_id) is not None

    def add(self, entry: Session) -> None:
        """Begin a session."""
        self._live[entry.session] = entry
        self._members[entry.group].append(entry)

    def end(self, session: int) -> None:
        """End a live session and remember whose it was."""
        entry = self._live.pop(session)
        self._members[entry.group].remove(entry)
        self._ended[session] = entry.worker_id

    def of_worker(self, worker_id: str) -> Session | None:
        """Return the live session of a worker."""
        return next((entry for entry in self._live.values() if entry.worker_id == worker_id), None)

    def of_group(self, group: str) -> Sequence[Session]:
        """Return the live sessions of a group, as long as none begins or ends."""
        return self._members[group]

    def with_room(self, group: str, load: Callable[[int], int]) -> list[Member]:
        """Return the group's sessions that may get a lease (R4, R5)."""
        with_room = []
        for entry in self._members[group]:
            num_leases = load(entry.session)
            if num_leases < entry.capacity and not entry.owed:
                with_room.append((num_leases, entry.last_lease_id, entry))
        return with_room

    def silent_since(self, moment: float) -> list[Session]:
        """Return live sessions not heard of since `moment`."""
        return [entry for entry in self._live.values() if entry.last_seen < moment]

    def leave(self, entry: Session, deadline: float) -> None:
        """Keep an ended session's rows for its worker until the deadline."""
        self._estates.append(Estate(entry.session, entry.worker_id, entry.group, deadline))

    def inherit(self, heir: Session) -> list[int]:
        """Return the ended sessions of the same worker and group, which wait no longer."""
        mine = [e for e in self._estates if (e.worker_id, e.group) == (heir.worker_id, heir.group)]
        self._estates = [estate for estate in self._estates if estate not in mine]
        return [estate.session for estate in mine]

    def overdue(self, now: float) -> list[Estate]:
        """Return what nobody came for, and keep it no longer."""
        late = [estate for estate in self._estates if estate.deadline <= now]
        self._estates = [estate for estate in self._estates if estate.deadline > now]
        return late

    def has_estate(self, group: str) -> bool:
        """Whether rows of the group wait for a worker's next session."""
        return any(estate.group == group for estate in self._estates)

    def postpone(self, seconds: float) -> None:
        """Move every session's last sign of life and every deadline."""
        for entry in self._live.values():
            entry.last_seen += seconds
        for estate in self._estates:
            estate.deadline += seconds

    def __len__(self) -> int:
        return len(self._live)


def next_pair(
    book: SlotBook, group: str, with_room: list[Member]
) -> tuple[Delivery, Member] | None:
    """Take the next one to get a row off the list, and return the row with it."""
    with_room.sort(key=_LOAD_AND_TURN)
    has_others = len(with_room) > 1
    for index, member in enumerate(with_room):
        delivery = book.next_ready(group, member[2].session, has_others=has_others)
        if delivery is not None:
            del with_room[index]
            return delivery, member
    return None
