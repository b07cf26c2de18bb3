"""A ring's owner: memory, a ROUTER, and one thread that speaks for it.

    main thread   loan -> write -> publish          waits for: a free slot (bounded)
    ring thread   messages and time -> transitions   waits for: the socket, a tick
    unblocked by  loan: a release, a nack, a dead session, close;  ring thread: either of its two

Whoever holds the lock speaks at the socket: `publish` sends its descriptor itself, and `loan` hears
what comes while it waits (`listening`); the ring thread does both at all other times.

A slot is freed only when every group's delivery is terminal, since a reader may copy until then.
"""

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

import xxhash
import zmq

from common.config.shared import GroupTable, RingTable
from common.contracts.codec import encode
from common.contracts.control_messages import RingReport
from common.contracts.ring_messages import OWNER_DECODER
from common.contracts.rows import RowSchema
from common.contracts.sequences import ONE_RING, SequenceSet, Shard
from common.errors import ConfigError, MessageError, StaleEpochError
from common.ring.backings import BACKINGS, Backing
from common.ring.book import PublishedRow
from common.ring.endpoint import Endpoint, Listener
from common.ring.layout import PAGE_BYTES, SlotHeader, SlotLayout, pack_header
from common.ring.listening import SocketCondition, Watch
from common.ring.protocol import OwnerProtocol
from common.ring.reports import ring_report
from common.ring.segment import SEGMENT_PREFIX, HostSegment, require_present
from common.ring.slot_memory import SlotMemory
from common.ring.writable import WritableSlot
from common.sockets import has_message, receive_from, send_to

TICK_SECONDS = 0.1
# A tick this late means that this process was stopped, not its peers.
_STALL_SECONDS = 1.0
# How often the owner looks whether its segment's file is still there.
_LOOK_SECONDS = 1.0
# Messages taken in one turn, so that a peer that never stops cannot keep the lock.
_MESSAGES_A_TURN = 256
_log = logging.getLogger(__name__)


class RingOwner:
    """Sole owner of a ring's memory and of every slot's state.

    Callers name rows by their sequence in the run; slots and messages by their number in the ring.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        run: str,
        schema: RowSchema,
        table: RingTable,
        groups: dict[str, GroupTable],
        total_rows: int | None = None,
        settled: dict[str, SequenceSet] | None = None,
        shard: Shard = ONE_RING,
        backing: Backing = HostSegment,
        gpu: int | None = None,
        transport_reason: str = "",
    ) -> None:
        self.layout = SlotLayout(schema)
        self.ring_epoch = secrets.randbits(64)
        self._shard = shard
        self._transport_reason = transport_reason
        self._checksum = table.checksum_payload
        self._refused: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._is_closed = False
        if table.checksum_payload and backing is BACKINGS["cuda_ipc"]:
            raise ConfigError(
                "ring.checksum_payload reads every byte on the CPU; set it to false, or "
                "ring.transport to 'host'"
            )
        name = segment_name(run, endpoint, self.ring_epoch)
        self._segment = backing.create(
            name, table.num_slots, self.layout.slot_bytes,
            head_bytes=self.layout.head_bytes, gpu=gpu,
        )  # fmt: skip
        try:
            self._protocol = OwnerProtocol(
                self.ring_epoch,
                self._segment.ref,
                schema,
                table=table,
                groups=groups,
                total_rows=total_rows,
                settled=settled,
                shard=shard,
            )
            self._listener = Listener(endpoint)
        except BaseException:
            self._segment.close()
            raise
        is_resumed = self._listener.replaced_another or any(
            known != SequenceSet() for known in (settled or {}).values()
        )
        self._opens_at = time.monotonic() + (table.resume_wait_seconds if is_resumed else 0.0)
        self._slot_freed = SocketCondition()
        self._lock = self._slot_freed.lock
        self._watch = Watch(self._slot_freed, self._turn)
        with self._lock:
            self._watch.attach(self._listener.socket)
        self._thread = threading.Thread(target=self._run, name="ring-owner", daemon=True)
        self._thread.start()

    def loan(self, timeout: float) -> WritableSlot | None:
        """FREE -loan-> WRITING: return a slot, or None where the ring stays full.

        After a restart the first loan waits `resume_wait`: live sessions say what they hold (R8).
        """
        now = time.monotonic()
        deadline = now + timeout
        with self._lock:
            while (slot := self._next_free_slot(now)) is None:
                if now >= deadline:
                    return None
                until = min(deadline, self._opens_at) if now < self._opens_at else deadline
                self._slot_freed.wait(until - now)
                now = time.monotonic()
        memory = self._segment.slot(slot)
        # SYNC POINT (R1): the old generation is gone before the first byte of the new payload.
        memory.invalidate()
        return WritableSlot(self, slot, memory)

    def publish_slot(
        self, slot: int, memory: SlotMemory, row: PublishedRow, documents: int
    ) -> None:
        """WRITING -publish-> PUBLISHED: write the header and announce the row."""
        layout = self.layout
        row = PublishedRow(self._shard.to_local(row.sequence), *row[1:])
        payload_hash = xxhash.xxh3_64_intdigest(memory.view[PAGE_BYTES:]) if self._checksum else 0
        with self._lock:
            self._check_open()
            header = SlotHeader(
                ring_epoch=self.ring_epoch,
                slot=slot,
                generation=self._protocol.book.next_generation(slot),
                sequence=row.sequence,
                split=row.split,
                used_tokens=row.used_tokens,
                num_documents=documents,
                payload_bytes=layout.payload_bytes,
                token_hash=row.token_hash,
                payload_hash=payload_hash,
                schema_fingerprint=layout.fingerprint,
            )
            # SYNC POINT: payload, then header, then the announcement; the socket orders the rest.
            memory.publish_header(pack_header(header))
            self._protocol.publish(slot, row, time.monotonic())
            if self._protocol.outbox:
                self._exchange()
            else:  # the socket is as the last turn has left it
                self._tell_waiting()

    def abort_slot(self, slot: int) -> None:
        """WRITING -abort-> FREE."""
        with self._slot_freed:
            self._protocol.book.abort(slot)
            self._slot_freed.notify_all()

    def wants(self, sequence: int) -> bool:
        """Whether any group still needs the sequence."""
        with self._lock:
            return self._protocol.wants(self._shard.to_local(sequence))

    def next_recapture(self) -> int | None:
        """Return a sequence that is to be captured again, or None (R8)."""
        with self._lock:
            local = self._protocol.next_recapture()
            return None if local is None else self._shard.to_global(local)

    def settled_below(self) -> int:
        """Recipes of sequences under this one are not needed again."""
        with self._lock:
            return self._shard.to_global(self._protocol.settled_below())

    def end(self, last_sequence: int) -> None:
        """Tell every session that the stream is over (R7); -1: without a row of this ring."""
        with self._lock:
            self._protocol.end(self._shard.num_below(last_sequence + 1) - 1)

    def is_drained(self) -> bool:
        """Every row is settled in every group, and no session is left."""
        with self._lock:
            self._raise_failure()
            return self._protocol.is_drained()

    def report(self) -> RingReport:
        """Return the ring's state and counters."""
        with self._lock:
            return ring_report(self._protocol, self._segment.ref, self._transport_reason,
                               dict(self._refused))  # fmt: skip

    def close(self) -> None:
        """Stop the thread, close the socket, remove the segment; a second call does nothing."""
        with self._slot_freed:
            if self._is_closed:
                return
            self._stop.set()
            self._watch.nudge()
            self._is_closed = True
            self._slot_freed.notify_all()
        self._thread.join()
        self._segment.close()
        self._listener.unlink()

    def __enter__(self) -> "RingOwner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _next_free_slot(self, now: float) -> int | None:
        if self._failure is not None or self._is_closed:
            self._check_open()
        return self._protocol.book.loan() if now >= self._opens_at else None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise StaleEpochError(f"ring_epoch {self.ring_epoch}: the ring is closed; stop writing")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            _log.exception("ring thread failed")
            with self._slot_freed:
                self._failure = error
                self._slot_freed.notify_all()
        finally:
            with self._lock:
                self._watch.detach()
            self._listener.close()

    def _serve(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        next_look = time.monotonic() + _LOOK_SECONDS
        while not self._stop.is_set():
            has_come = self._watch.wait(next_tick)
            with self._lock:
                now = time.monotonic()
                if now - next_tick > _STALL_SECONDS:
                    _log.warning("the ring's owner was stopped for %.1f s", now - next_tick)
                    self._protocol.postpone(now - next_tick)
                if now >= next_tick:
                    self._protocol.tick(time.monotonic())
                    if num_refused := self._listener.num_refused():
                        self._refused["handshake"] += num_refused
                    next_tick = time.monotonic() + TICK_SECONDS
                if now >= next_look:
                    require_present(self._segment)
                    next_look = now + _LOOK_SECONDS
                self._exchange(has_come=has_come)

    def _turn(self) -> None:
        self._exchange(has_come=True)

    def _exchange(self, *, has_come: bool = False) -> None:
        """Send and receive until neither is left to do; the caller holds the lock.

        Args:
            has_come: a message may be there, so that to receive it is the way to ask.
        """
        socket = self._listener.socket
        for _ in range(_MESSAGES_A_TURN):
            if self._protocol.outbox:
                self._send_all(socket)
            if not (has_come or has_message(socket)):
                break
            has_come = False
            self._receive(socket)
        else:
            self._watch.nudge()
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        if self._slot_freed.num_waiting and not self._protocol.book.is_blocked():
            self._slot_freed.notify_all()

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        parts = receive_from(socket)
        try:
            if len(parts) != 2:
                if not parts:
                    return
                raise MessageError("malformed", f"got {len(parts)} parts, expected 2")
            record = OWNER_DECODER.decode(parts[1])
        except MessageError as error:
            self._refused[error.reason] += 1
            _log.debug("message dropped: %s", error)
            return
        self._protocol.receive(parts[0], record, time.monotonic())

    def _send_all(self, socket: "zmq.Socket[bytes]") -> None:
        messages, self._protocol.outbox = self._protocol.outbox, []
        for identity, record in messages:
            try:
                send_to(socket, identity, encode(record))
            except zmq.ZMQError as error:  # would block, or the peer is unreachable
                self._refused["unsent"] += 1
                _log.debug("message to %r not sent: %s", identity, error)
                self._protocol.undo(record)


def segment_name(run: str, endpoint: Endpoint, ring_epoch: int) -> str:
    """Return a segment name that no other run, target or ring_epoch has."""
    return f"{SEGMENT_PREFIX}{run}-{os.getpid()}-{place_of(endpoint)}-{ring_epoch:016x}"


def place_of(endpoint: Endpoint) -> str:
    """Return the part of a segment's name that says at which endpoint its ring is."""
    path = endpoint if isinstance(endpoint, Path) else endpoint.path
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
