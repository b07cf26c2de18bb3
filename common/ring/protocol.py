"""The owner's side of the protocol: messages and time in, transitions and messages out. No I/O.

Rules R2 to R8 of docs/ring-protocol.md are here; each is named where it acts. `receive` never
raises for what a peer says: what does not fit is a counted no-op.
"""

from collections import Counter

from common.config.shared import GroupTable, RingTable
from common.contracts.record import Record
from common.contracts.ring_messages import (
    Bye,
    Credit,
    Descriptor,
    Heartbeat,
    Hello,
    LeaseRef,
    Nack,
    Pulse,
    RefusalKind,
    Refused,
    Release,
    SegmentRef,
    Welcome,
)
from common.contracts.rows import RowSchema
from common.contracts.sequences import ONE_RING, SequenceSet, Shard
from common.ring.book import Delivery, PublishedRow, SlotBook, describe
from common.ring.ledger import GroupLedger
from common.ring.policies import GroupPolicies
from common.ring.sessions import Session, SessionTable, next_pair
from common.ring.states import DeliveryState


class OwnerProtocol:
    """All state of one ring but its bytes."""

    def __init__(
        self,
        ring_epoch: int,
        segment: SegmentRef,
        schema: RowSchema,
        *,
        table: RingTable,
        groups: dict[str, GroupTable],
        total_rows: int | None = None,
        settled: dict[str, SequenceSet] | None = None,
        shard: Shard = ONE_RING,
    ) -> None:
        """`settled` and `total_rows` are of the whole run; everything else counts in this ring."""
        self.ring_epoch = ring_epoch
        self.outbox: list[tuple[bytes, Record]] = []
        self.stale_calls: Counter[str] = Counter()
        self.reclaimed: Counter[str] = Counter()
        self.book = SlotBook(segment.num_slots, groups, table.watermark_slots)
        self.sessions = SessionTable()
        known = settled or {}
        self.ledgers = {
            name: GroupLedger(shard.local_set(known.get(name, SequenceSet()))) for name in groups
        }
        self.policies = GroupPolicies(groups, self.book, self.ledgers)
        self.shard = shard
        self._segment = segment
        self._schema = schema
        self._total_rows = total_rows
        self._table = table
        self._groups = groups
        self._poison_leases: dict[LeaseRef, int] = {}
        """Leases that ended in poison, and the session that held each."""
        self._last_sequence: int | None = None
        self._handlers = {
            Hello: self._on_hello,
            Heartbeat: self._on_heartbeat,
            Credit: self._on_credit,
            Release: self._on_release,
            Nack: self._on_nack,
            Bye: self._on_bye,
        }

    # -- the target server's calls ---------------------------------------------------------------

    def publish(self, slot: int, row: PublishedRow, now: float) -> None:
        """Publish a written slot to every group that lacks its sequence (mask fixed here)."""
        groups = self.policies.takers(row.sequence)
        if not groups:  # a session came with the row while it was being captured
            self.book.abort(slot)
            return
        self.book.publish(slot, row, groups, now)
        for name in groups:
            self.ledgers[name].publish(row.sequence)
        self._grant(now)

    def wants(self, sequence: int) -> bool:
        """Whether any group still needs the sequence."""
        return bool(self.policies.takers(sequence))

    def next_recapture(self) -> int | None:
        """Return a sequence that is to be captured again, or None (R8)."""
        for ledger in self.ledgers.values():
            sequence = ledger.next_recapture()
            if sequence is not None:
                for other in self.ledgers.values():
                    other.is_captured_elsewhere(sequence)
                return sequence
        return None

    def end(self, last_sequence: int) -> None:
        """The stream is over; told in every pulse from here on (R7)."""
        self._last_sequence = last_sequence

    def postpone(self, seconds: float) -> None:
        """Move every deadline: the owner itself has not listened for so long."""
        self.sessions.postpone(seconds)
        self.book.postpone(seconds)
        self.policies.postpone(seconds)

    def is_drained(self) -> bool:
        """Every row of every group is settled and every session has said goodbye or is dead."""
        return all(self._group_is_drained(name) for name in self._groups) and not len(self.sessions)

    def settled_below(self) -> int:
        """Recipes of sequences under this one are not needed again."""
        return min(ledger.settled_below for ledger in self.ledgers.values())

    # -- messages --------------------------------------------------------------------------------

    def receive(self, identity: bytes, record: Record, now: float) -> None:
        """Act on one decoded message."""
        self._handlers[type(record)](identity, record, now)  # type: ignore[operator]

    def undo(self, record: Record) -> None:
        """A descriptor could not be sent: its lease ends without an attempt."""
        if isinstance(record, Descriptor):
            delivery = self.book.current(record.lease, record.session)
            if delivery is not None:
                self.book.requeue(delivery, self._table.max_attempts, counts=False)

    def tick(self, now: float) -> None:
        """Expire leases, end silent sessions, give up waiting for successors, apply policies."""
        for delivery in self.book.leases():
            if delivery.lease is not None and delivery.lease.expires_at <= now:
                self._expire(delivery)
        for entry in self.sessions.silent_since(now - self._table.session_timeout_seconds):
            self._end_session(entry, now, "silent")
        for estate in self.sessions.overdue(now):
            self.ledgers[estate.group].lose(estate.session)
        present = {name for name in self._groups if self.sessions.of_group(name)}
        drained = {name for name in self._groups if self._group_is_drained(name)}
        self.policies.apply(present, drained, now)
        self._grant(now)

    def _on_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        if hello.group not in self._groups:
            reason = f"group {hello.group!r} is not of this run; known: {sorted(self._groups)}"
            self._refuse(identity, hello.session, "unknown_group", reason)
            return
        if hello.shard != self.shard:
            reason = f"this ring is {self.shard} of its run, the worker's is {hello.shard}"
            self._refuse(identity, hello.session, "other_shard", reason)
            return
        if self.sessions.has_ended(hello.session):
            self._refuse_ended(identity, hello.session)
            return
        entry = self.sessions.get(hello.session)
        if entry is None:
            entry = self._begin_session(identity, hello, now)
        elif entry.identity != identity or entry.group != hello.group:
            self.stale_calls["hello"] += 1
            return
        elif entry.accepts(hello.number):
            entry.capacity = hello.capacity
        entry.last_seen = now
        self._send(entry, self._welcome(hello.session))
        self._grant(now)

    def _begin_session(self, identity: bytes, hello: Hello, now: float) -> Session:
        predecessor = self.sessions.of_worker(hello.worker_id)
        if predecessor is not None:
            self._end_session(predecessor, now, "replaced")
        entry = Session(
            hello.worker_id, hello.session, identity, hello.group, hello.capacity, hello.number,
            now, hello.consumed, hello.committed,
        )  # fmt: skip
        self.sessions.add(entry)
        self.policies.attend(entry.group)
        self._inherit(entry, hello.consumed.union(hello.staged), now)
        return entry

    def _on_heartbeat(self, identity: bytes, beat: Heartbeat, now: float) -> None:
        entry = self._session(identity, beat.ring_epoch, beat.session, "heartbeat")
        if entry is None:
            return
        entry.last_seen = now
        if not entry.accepts(beat.number):
            self.stale_calls["heartbeat"] += 1
            return
        entry.capacity = beat.capacity
        entry.consumed, entry.committed = beat.consumed, beat.committed
        self.ledgers[entry.group].commit(entry.session, beat.committed)
        self._heal(entry, beat, now)
        self._send(entry, self._pulse(entry, beat.number))
        self._grant(now)

    def _heal(self, entry: Session, beat: Heartbeat, now: float) -> None:
        """Renew listed leases (R5), send unlisted ones again (R3), note what the session owes."""
        held, leases = set(beat.held), self.book.leases(entry.session)
        # What it lists and does not have any more, whichever beat was read when the lease expired.
        entry.owed = {ref.lease_id for ref in held.difference(d.ref for d in leases)}
        self.stale_calls["held"] += len(entry.owed)
        lease_times = self._table.lease_seconds, self._table.lease_max_seconds
        for delivery in leases:
            lease = delivery.lease
            if lease is None:
                continue
            if delivery.ref in held:
                lease.renew(now, *lease_times)
            elif now - lease.seen_at >= self._table.heartbeat_seconds:
                if not entry.owed:  # one that never reached its session is not the session's fault
                    lease.granted_at = now
                    lease.renew(now, *lease_times)
                lease.seen_at = now
                self._send(entry, describe(delivery, self.ring_epoch))

    def _on_credit(self, identity: bytes, credit: Credit, now: float) -> None:
        entry = self._session(identity, credit.ring_epoch, credit.session, "credit")
        if entry is None:
            return
        if not entry.accepts(credit.number):
            self.stale_calls["credit"] += 1
            return
        entry.capacity = credit.capacity
        self._grant(now)

    def _on_release(self, identity: bytes, release: Release, now: float) -> None:
        entry = self._session(identity, release.ring_epoch, release.session, "release")
        if entry is None:
            return
        if entry.accepts(release.number):
            entry.capacity = release.capacity
        entry.owed.discard(release.lease.lease_id)
        delivery = self.book.current(release.lease, release.session)
        if delivery is None:
            self.stale_calls["release"] += 1
            if self._poison_leases.get(release.lease) == release.session:
                del self._poison_leases[release.lease]
                self.book.accounts[entry.group]["poison_late"] += 1
        else:
            self._release(delivery, entry.session)
        self._grant(now)

    def _on_nack(self, identity: bytes, nack: Nack, now: float) -> None:
        entry = self._session(identity, nack.ring_epoch, nack.session, "nack")
        if entry is None:
            return
        if entry.accepts(nack.number):
            entry.capacity = nack.capacity
        entry.owed.discard(nack.lease.lease_id)
        delivery = self.book.current(nack.lease, nack.session)
        if delivery is None:
            self.stale_calls["nack"] += 1
        else:
            self._reclaim(delivery, f"nack_{nack.reason}", counts=nack.reason != "stopping")
        self._grant(now)

    def _on_bye(self, identity: bytes, bye: Bye, now: float) -> None:
        entry = self._session(identity, bye.ring_epoch, bye.session, "bye")
        if entry is None:
            return
        group, ledger = entry.group, self.ledgers[entry.group]
        ledger.commit(entry.session, bye.committed)
        for delivery in self.book.leases(entry.session):
            if delivery.row.sequence in bye.committed:  # its release was lost on the way
                self._release(delivery, entry.session)
            else:
                self._reclaim(delivery, "bye", counts=False)
        self.sessions.end(entry.session)
        ledger.lose(entry.session)
        self.policies.leave(group, bye.is_finished and not self.sessions.of_group(group))
        self._grant(now)

    # -- mechanics -------------------------------------------------------------------------------

    def _session(self, identity: bytes, ring_epoch: int, session: int, call: str) -> Session | None:
        """Return the live session a message speaks for, or answer what is wrong with it."""
        entry = self.sessions.get(session)
        if ring_epoch == self.ring_epoch and entry is not None and entry.identity == identity:
            return entry
        self.stale_calls[call] += 1
        if self.sessions.has_ended(session):
            self._refuse_ended(identity, session)
        else:
            self._refuse(identity, session, "unknown_session", "say Hello")
        return None

    def _inherit(self, entry: Session, held: SequenceSet, now: float) -> None:
        """Hand the rows of the worker's ended sessions to its new one (R8).

        Of what it holds, rows may be in the ring again: it came after `resume_wait`, or while they
        were captured. They are its own at once, so that nobody trains them a second time.
        """
        ledger = self.ledgers[entry.group]
        for ended in self.sessions.inherit(entry):
            ledger.lose(ended)
        for delivery in self.book.ready(entry.group):
            if delivery.row.sequence in held:
                self.book.lease(delivery, entry.session, now, now)
                self._release(delivery, entry.session)
        ledger.welcome(entry.session, held)
        ledger.commit(entry.session, entry.committed)

    def _end_session(self, entry: Session, now: float, reason: str) -> None:
        for delivery in self.book.leases(entry.session):
            self._reclaim(delivery, reason, counts=True)
        self.sessions.end(entry.session)
        ledger = self.ledgers[entry.group]
        if ledger.holds_for(entry.session):
            self.sessions.leave(entry, now + self._table.resume_wait_seconds)
        else:
            ledger.lose(entry.session)

    def _release(self, delivery: Delivery, session: int) -> None:
        self.book.release(delivery)
        self.ledgers[delivery.group].release(delivery.row.sequence, session)

    def _expire(self, delivery: Delivery) -> None:
        lease = delivery.lease
        if lease is not None and (entry := self.sessions.get(lease.session)) is not None:
            entry.owed.add(lease.ref.lease_id)
        self._reclaim(delivery, "expired", counts=True)

    def _reclaim(self, delivery: Delivery, reason: str, *, counts: bool) -> None:
        self.reclaimed[reason] += 1
        ref = delivery.ref
        self.book.requeue(delivery, self._table.max_attempts, counts=counts)
        if delivery.state is DeliveryState.POISON:
            self._poison_leases[ref] = delivery.avoid_session
            self.ledgers[delivery.group].drop(delivery.row.sequence)

    def _grant(self, now: float) -> None:
        """Lease READY rows to sessions with room, the least loaded first, in turns (R4, R5)."""
        book, until = self.book, now + self._table.lease_seconds
        for name in self._groups:
            is_due = book.has_ready(name)
            with_room = self.sessions.with_room(name, book.num_leases) if is_due else []
            while with_room and (pair := next_pair(book, name, with_room)) is not None:
                delivery, (load, _, entry) = pair
                entry.last_lease_id = book.lease(delivery, entry.session, now, until)
                self.outbox.append((entry.identity, describe(delivery, self.ring_epoch)))
                if load + 1 < entry.capacity:
                    with_room.append((load + 1, entry.last_lease_id, entry))

    def _group_is_settled(self, name: str) -> bool:
        ended = self._last_sequence is not None
        busy = self.book.in_ring(name) or self.book.num_writing() or self.ledgers[name].num_awaited
        return ended and not busy and not self.sessions.has_estate(name)

    def _group_is_drained(self, name: str) -> bool:
        return self._group_is_settled(name) and self.ledgers[name].is_clear()

    def _welcome(self, session: int) -> Welcome:
        return Welcome(
            ring_epoch=self.ring_epoch,
            session=session,
            segment=self._segment,
            row_schema=self._schema,
            total_rows=self._total_rows,
            heartbeat_seconds=self._table.heartbeat_seconds,
            lease_seconds=self._table.lease_seconds,
        )

    def _pulse(self, entry: Session, number: int) -> Pulse:
        return Pulse(
            ring_epoch=self.ring_epoch,
            session=entry.session,
            number=number,
            settled_below=self.ledgers[entry.group].settled_below,
            last_sequence=self._last_sequence,
            is_settled=self._group_is_settled(entry.group),
            is_drained=self._group_is_drained(entry.group),
        )

    def _refuse_ended(self, identity: bytes, session: int) -> None:
        if self.sessions.is_replaced(session):
            reason = "another process of this worker id has taken over"
            self._refuse(identity, session, "replaced", reason)
        else:
            self._refuse(identity, session, "ended_session", "say Hello with a fresh session")

    def _refuse(self, identity: bytes, session: int, kind: RefusalKind, reason: str) -> None:
        refused = Refused(ring_epoch=self.ring_epoch, session=session, kind=kind, reason=reason)
        self.outbox.append((identity, refused))

    def _send(self, entry: Session, record: Record) -> None:
        self.outbox.append((entry.identity, record))
