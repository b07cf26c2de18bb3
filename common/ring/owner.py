"""A ring's owner: memory, a ROUTER, and one thread that speaks for it.

    main thread   loan -> write -> publish          waits for: a free slot (bounded)
    ring thread   messages and time -> transitions   waits for: the socket, a publish, a tick
    unblocked by  loan: a release, a nack, a dead session;  ring thread: any of its three

A slot is freed only when every group's delivery is terminal, since a reader may copy until then.
"""

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import xxhash
import zmq

from common.config.shared import GroupTable, RingTable
from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.control_messages import RingReport
from common.contracts.ring_messages import OWNER_DECODER
from common.contracts.rows import DocumentSpan, RowSchema, Split
from common.contracts.sequences import SequenceSet
from common.errors import ConfigError, MessageError, StaleEpochError
from common.ring.book import PublishedRow
from common.ring.layout import PAGE_BYTES, SlotHeader, SlotLayout, pack_documents, pack_header
from common.ring.protocol import OwnerProtocol
from common.ring.reports import ring_report
from common.ring.segment import SEGMENT_PREFIX, HostSegment, MemorySegment

TICK_SECONDS = 0.1
_log = logging.getLogger(__name__)


class WritableSlot:
    """The right to write one slot; ends with `publish` or `abort`. An exception aborts."""

    def __init__(self, owner: "RingOwner", slot: int, view: memoryview) -> None:
        self._owner = owner
        self._is_open = True
        self.slot = slot
        self.view = view

    def field(self, name: str) -> memoryview:
        """Return the bytes of a field."""
        field = self._owner.layout.fields[name]
        return self.view[field.offset : field.offset + field.num_bytes]

    def publish(
        self,
        *,
        sequence: int,
        split: Split,
        used_tokens: int,
        documents: Sequence[DocumentSpan],
    ) -> None:
        """WRITING -publish-> PUBLISHED: write the header last, then announce."""
        table = pack_documents(documents)
        self.field("documents")[: len(table)] = table
        self._owner._publish(self, sequence, split, used_tokens, len(documents))
        self._is_open = False

    def abort(self) -> None:
        """WRITING -abort-> FREE."""
        if self._is_open:
            self._is_open = False
            self._owner._abort(self.slot)

    def __enter__(self) -> "WritableSlot":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class RingOwner:
    """Sole owner of a ring's memory and of every slot's state."""

    def __init__(
        self,
        *,
        endpoint: Path,
        run: str,
        schema: RowSchema,
        table: RingTable,
        groups: dict[str, GroupTable],
        total_rows: int | None = None,
        settled: dict[str, SequenceSet] | None = None,
        backing: type[HostSegment] | type[MemorySegment] = HostSegment,
        transport_reason: str = "",
    ) -> None:
        self.layout = SlotLayout(schema)
        self.ring_epoch = secrets.randbits(64)
        self._transport_reason = transport_reason
        self._lock = threading.RLock()
        self._slot_freed = threading.Condition(self._lock)
        self._refused: Counter[str] = Counter()
        self._socket = _bind(endpoint)
        try:
            name = segment_name(run, endpoint, self.ring_epoch)
            self._segment = backing.create(name, table.num_slots, self.layout.slot_bytes)
        except BaseException:
            self._socket.close(linger=0)
            endpoint.unlink(missing_ok=True)
            raise
        self._endpoint = endpoint
        self._checksum = table.checksum_payload
        self._protocol = OwnerProtocol(
            self.ring_epoch,
            self._segment.ref,
            schema,
            table=table,
            groups=groups,
            total_rows=total_rows,
            settled=settled,
        )
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ring-owner", daemon=True)
        self._thread.start()

    def loan(self, timeout: float) -> WritableSlot | None:
        """FREE -loan-> WRITING: return a slot, or None where the ring stays full."""
        deadline = time.monotonic() + timeout
        with self._slot_freed:
            while True:
                self._raise_failure()
                slot = self._protocol.book.loan()
                if slot is not None:
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._slot_freed.wait(remaining)
        start = slot * self.layout.slot_bytes
        view = self._segment.view[start : start + self.layout.slot_bytes]
        # SYNC POINT (R1): the old generation is gone before the first byte of the new payload.
        view[:PAGE_BYTES] = bytes(PAGE_BYTES)
        return WritableSlot(self, slot, view)

    @property
    def memory(self) -> memoryview:
        """The whole segment."""
        return self._segment.view

    def wants(self, sequence: int) -> bool:
        """Whether any group still needs the sequence."""
        with self._lock:
            return self._protocol.wants(sequence)

    def next_recapture(self) -> int | None:
        """Return a sequence that is to be captured again, or None (R8)."""
        with self._lock:
            return self._protocol.next_recapture()

    def settled_below(self) -> int:
        """Recipes of sequences under this one are not needed again."""
        with self._lock:
            return self._protocol.settled_below()

    def end(self, last_sequence: int) -> None:
        """Tell every session that the stream is over (R7)."""
        with self._lock:
            self._protocol.end(last_sequence)

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
        """Stop the thread, close the socket, remove the segment."""
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._segment.close()
        self._endpoint.unlink(missing_ok=True)

    def __enter__(self) -> "RingOwner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _publish(
        self, writable: WritableSlot, sequence: int, split: Split, used_tokens: int, num_documents: int
    ) -> None:
        layout = self.layout
        token_hash = xxhash.xxh3_64_intdigest(writable.field("token_ids"))
        payload = writable.view[PAGE_BYTES:]
        with self._lock:
            if self._stop.is_set():
                raise StaleEpochError(f"ring_epoch {self.ring_epoch}: the ring is closed; stop writing")
            header = SlotHeader(
                ring_epoch=self.ring_epoch,
                slot=writable.slot,
                generation=self._protocol.book.next_generation(writable.slot),
                sequence=sequence,
                split=split,
                used_tokens=used_tokens,
                num_documents=num_documents,
                payload_bytes=layout.payload_bytes,
                token_hash=token_hash,
                payload_hash=xxhash.xxh3_64_intdigest(payload) if self._checksum else 0,
                schema_fingerprint=layout.schema.fingerprint,
            )
            packed = pack_header(header)
            # SYNC POINT: payload, then header, then the announcement; the socket orders the rest.
            writable.view[: len(packed)] = packed
            row = PublishedRow(sequence, split, used_tokens, layout.payload_bytes, token_hash)
            self._protocol.publish(writable.slot, row, time.monotonic())
        os.eventfd_write(self._wake, 1)

    def _abort(self, slot: int) -> None:
        with self._slot_freed:
            self._protocol.book.abort(slot)
            self._slot_freed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            _log.exception("ring thread failed")
            with self._slot_freed:
                self._failure = error
                self._slot_freed.notify_all()
        finally:
            self._socket.close(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._stop.is_set():
            events = dict(poller.poll(max(0.0, next_tick - time.monotonic()) * 1000))
            if self._wake in events:
                os.eventfd_read(self._wake)
            with self._slot_freed:
                if self._socket in events:
                    self._receive_all()
                if time.monotonic() >= next_tick:
                    self._protocol.tick(time.monotonic())
                    next_tick = time.monotonic() + TICK_SECONDS
                self._send_all()
                self._slot_freed.notify_all()

    def _receive_all(self) -> None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                if len(parts) != 2:
                    raise MessageError("malformed", f"got {len(parts)} parts, expected 2")
                record = OWNER_DECODER.decode(parts[1])
            except MessageError as error:
                self._refused[error.reason] += 1
                _log.debug("message dropped: %s", error)
                continue
            self._protocol.receive(parts[0], record, time.monotonic())

    def _send_all(self) -> None:
        messages, self._protocol.outbox = self._protocol.outbox, []
        for identity, record in messages:
            try:
                self._socket.send_multipart([identity, encode(record)], zmq.DONTWAIT)
            except zmq.ZMQError as error:  # would block, or the peer is unreachable
                self._refused["unsent"] += 1
                _log.debug("message to %r not sent: %s", identity, error)
                self._protocol.undo(record)


def segment_name(run: str, endpoint: Path, ring_epoch: int) -> str:
    """Return a segment name that no other run, target or ring_epoch has."""
    place = hashlib.sha256(str(endpoint.absolute()).encode()).hexdigest()[:8]
    return f"{SEGMENT_PREFIX}{run}-{os.getpid()}-{place}-{ring_epoch:016x}"


def _bind(endpoint: Path) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
    try:
        # The caller holds the run's lock, so a socket file that is here has no live owner.
        endpoint.unlink(missing_ok=True)
        socket.bind(f"ipc://{endpoint}")
        endpoint.chmod(0o600)
    except (zmq.ZMQError, OSError) as error:
        socket.close(linger=0)
        raise ConfigError(f"ring socket {endpoint}: {error}; choose another run.directory") from error
    return socket
