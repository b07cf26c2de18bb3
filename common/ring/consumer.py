"""A worker's side of one ring: leases in, releases out, heartbeats that heal.

    caller's thread   acquire -> copy -> verify -> release      waits for: a descriptor (bounded)
    ring thread       descriptors, pulses; heartbeats           waits for: the socket, a call, a beat
    unblocked by      acquire: a descriptor, a drained stream, close

A lease covers one copy. After `release` its staging buffer stays busy until `return_buffer`; the
capacity in every message counts the buffers that are free or under a lease (R4).
"""

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path

import zmq

from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.record import Record
from common.contracts.ring_messages import (
    WORKER_DECODER,
    Bye,
    Descriptor,
    Heartbeat,
    Hello,
    LeaseRef,
    Nack,
    NackReason,
    Pulse,
    Refused,
    Release,
    Welcome,
)
from common.contracts.rows import RowSchema
from common.contracts.sequences import SequenceSet
from common.errors import ConfigError, MessageError
from common.ring.layout import SlotLayout
from common.ring.lease import Lease
from common.ring.segment import Segment, attach

HELLO_SECONDS = 0.5
# A lease whose answer is older than this many others is no longer on the owner's record.
_OUTCOMES_KEPT = 65_536
_log = logging.getLogger(__name__)


class RingConsumer:
    """One session with one ring. `acquire` and `Lease` calls may come from any one thread."""

    def __init__(
        self,
        *,
        endpoint: Path,
        worker_id: str,
        group: str,
        capacity: int,
        consumed: SequenceSet | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._group = group
        self._capacity = capacity
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._consumed: set[int] = set(consumed.above) if consumed else set()
        self._committed: set[int] = set(self._consumed)
        self._settled_below = consumed.low if consumed else 0
        self._waiting: deque[Lease] = deque()
        self._held: dict[int, LeaseRef] = {}
        self._outcomes: OrderedDict[int, NackReason | None] = OrderedDict()
        self._num_busy = 0
        self._outbox: deque[Record] = deque()
        self._welcome: Welcome | None = None
        self._segments: dict[int, Segment] = {}
        self._layout: SlotLayout | None = None
        self._pulse: Pulse | None = None
        self._failure: BaseException | None = None
        self._last_heard = time.monotonic()
        self._begin_session()
        self._stop = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ring-consumer", daemon=True)
        self._thread.start()

    # -- the worker's calls ----------------------------------------------------------------------

    def schema(self, timeout: float) -> RowSchema | None:
        """Wait for the owner's welcome; return the rows' schema, or None after `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: self._welcome or self._failure, timeout)
            self._raise_failure()
            return self._welcome.row_schema if self._welcome else None

    @property
    def total_rows(self) -> int | None:
        """Rows of the whole stream, where the owner knows it."""
        return self._welcome.total_rows if self._welcome else None

    @property
    def memory(self) -> memoryview | None:
        """The owner's whole segment, once welcomed."""
        return self._segments[self._welcome.ring_epoch].view if self._welcome else None

    def acquire(self, timeout: float) -> Lease | None:
        """READY -lease-> LEASED, by the owner: return the next lease, or None after `timeout`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._failure or self.is_drained, timeout
            )
            self._raise_failure()
            return self._waiting.popleft() if self._waiting else None

    def return_buffer(self) -> None:
        """A staging buffer is free again: ask for the next row at once."""
        with self._lock:
            self._num_busy -= 1
            self._beat()
        self._nudge()

    def mark_consumed(self, sequences: set[int]) -> None:
        """These sequences are in an applied optimizer step (R8)."""
        with self._lock:
            self._consumed |= sequences

    def mark_committed(self) -> None:
        """Every consumed sequence is in a durable checkpoint (R8)."""
        with self._lock:
            self._committed |= self._consumed
            self._beat()
        self._nudge()

    @property
    def consumed(self) -> SequenceSet:
        """What this worker's weights contain, together with all that is settled group-wide."""
        with self._lock:
            return SequenceSet.of(self._consumed, low=self._settled_below)

    @property
    def is_settled(self) -> bool:
        """The stream has ended and nothing of the group is on its way: time to commit (R7)."""
        return self._pulse is not None and self._pulse.is_settled

    @property
    def is_drained(self) -> bool:
        """Every row of the group is settled and committed (R7)."""
        return self._pulse is not None and self._pulse.is_drained

    @property
    def silent_seconds(self) -> float:
        """How long the owner has said nothing."""
        return time.monotonic() - self._last_heard

    def close(self) -> None:
        """Give back what is held, say goodbye, stop."""
        with self._lock:
            for lease in list(self._waiting):
                lease.nack("stopping")
            if self._welcome is not None:
                committed = SequenceSet.of(self._committed, low=self._settled_below)
                self._outbox.append(
                    Bye(ring_epoch=self._welcome.ring_epoch, session=self._session, committed=committed)
                )
        self._stop.set()
        self._nudge()
        self._thread.join()
        os.close(self._wake)
        for segment in self._segments.values():
            segment.close()

    # -- sessions and messages -------------------------------------------------------------------

    def _begin_session(self) -> None:
        """Draw a fresh session; what an older one held is void."""
        self._session = secrets.randbits(64)
        self._number = 0
        self._welcome = None
        self._pulse = None
        self._waiting.clear()
        self._held.clear()
        self._outcomes.clear()
        self._next_hello = 0.0
        self._is_fresh = True

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _free_capacity(self) -> int:
        return max(0, self._capacity - self._num_busy)

    def finish(self, lease: Lease, reason: NackReason | None) -> None:
        """End a lease: LEASED -release-> RELEASED, or -requeue-> READY with a reason."""
        told = lease.descriptor
        with self._lock:
            if self._held.pop(told.lease.lease_id, None) is not None:
                self._outcomes[told.lease.lease_id] = reason
                if len(self._outcomes) > _OUTCOMES_KEPT:
                    self._outcomes.popitem(last=False)
            if lease in self._waiting:
                self._waiting.remove(lease)
            self._num_busy += reason is None
            if told.session == self._session:
                self._outbox.append(self._outcome(told, reason))
        self._nudge()

    def _outcome(self, told: Descriptor, reason: NackReason | None) -> Record:
        common = {
            "ring_epoch": told.ring_epoch,
            "session": told.session,
            "number": self._next_number(),
            "capacity": self._free_capacity(),
            "lease": told.lease,
        }
        return Release(**common) if reason is None else Nack(**common, reason=reason)  # type: ignore[arg-type]

    def _beat(self) -> None:
        if self._welcome is None:
            return
        self._outbox.append(
            Heartbeat(
                ring_epoch=self._welcome.ring_epoch,
                session=self._session,
                number=self._next_number(),
                capacity=self._free_capacity(),
                held=tuple(self._held.values()),
                consumed=SequenceSet.of(self._consumed, low=self._settled_below),
                committed=SequenceSet.of(self._committed, low=self._settled_below),
            )
        )
        self._next_beat = time.monotonic() + self._welcome.heartbeat_seconds

    def _hello(self) -> Hello:
        return Hello(
            worker_id=self._worker_id,
            session=self._session,
            number=self._next_number(),
            group=self._group,
            capacity=self._free_capacity(),
            pid=os.getpid(),
            consumed=SequenceSet.of(self._consumed, low=self._settled_below),
            committed=SequenceSet.of(self._committed, low=self._settled_below),
        )

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.session != self._session:
            return
        if self._welcome is None:
            if welcome.ring_epoch not in self._segments:
                self._segments[welcome.ring_epoch] = attach(welcome.segment)
            self._layout = SlotLayout(welcome.row_schema)
            needed = self._layout.slot_bytes * welcome.segment.num_slots
            if needed > welcome.segment.num_bytes:
                raise ConfigError(
                    f"ring {self._endpoint}: got a segment of {welcome.segment.num_bytes} bytes, "
                    f"expected {needed}; target server and worker are of different versions"
                )
            self._welcome = welcome
            self._beat()

    def _on_descriptor(self, told: Descriptor) -> None:
        """Take a lease into a free buffer; answer a finished one again; drop the rest (R3, R4)."""
        welcome, layout = self._welcome, self._layout
        if welcome is None or layout is None or told.session != self._session:
            return
        lease_id = told.lease.lease_id
        if lease_id in self._outcomes:
            self._outbox.append(self._outcome(told, self._outcomes[lease_id]))
        elif lease_id not in self._held and len(self._held) < self._free_capacity():
            if told.lease.slot >= welcome.segment.num_slots:
                raise MessageError("malformed", f"slot {told.lease.slot} is not of the ring")
            start = told.lease.slot * layout.slot_bytes
            view = self._segments[welcome.ring_epoch].view[start : start + layout.slot_bytes]
            self._held[lease_id] = told.lease
            self._waiting.append(Lease(self, told, view, layout))

    def _on_pulse(self, pulse: Pulse) -> None:
        if pulse.session != self._session or (self._pulse and pulse.number < self._pulse.number):
            return
        self._pulse = pulse
        self._settled_below = max(self._settled_below, pulse.settled_below)
        self._consumed = {s for s in self._consumed if s >= self._settled_below}
        self._committed = {s for s in self._committed if s >= self._settled_below}

    def _on_refused(self, refused: Refused) -> None:
        if refused.session != self._session:
            return
        if refused.kind == "unknown_group":
            raise ConfigError(f"ring {self._endpoint}: {refused.reason}")
        _log.warning("session %016x is refused (%s): begin a fresh one", self._session, refused.kind)
        self._begin_session()

    # -- the ring thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            _log.debug("ring thread failed", exc_info=True)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _serve(self) -> None:
        socket = None
        try:
            while True:
                with self._lock:
                    if self._is_fresh:
                        if socket is not None:
                            socket.close(linger=0)
                        socket = _connect(self._endpoint, f"{self._worker_id}/{self._session:016x}")
                        self._is_fresh = False
                    stopping = self._stop.is_set()
                    self._send_due(socket)
                if stopping:
                    socket.close(linger=1000)
                    return
                self._wait(socket)
                self._receive_all(socket)
        finally:
            if socket is not None and not socket.closed:
                socket.close(linger=0)

    def _wait(self, socket: zmq.Socket) -> None:
        due = self._next_beat if self._welcome else self._next_hello
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        events = dict(poller.poll(max(0.0, due - time.monotonic()) * 1000))
        if self._wake in events:
            os.eventfd_read(self._wake)

    def _send_due(self, socket: zmq.Socket) -> None:
        now = time.monotonic()
        if self._welcome is None and now >= self._next_hello:
            self._outbox.append(self._hello())
            self._next_hello = now + HELLO_SECONDS
        elif self._welcome is not None and now >= self._next_beat:
            self._beat()
        while self._outbox:
            try:
                socket.send(encode(self._outbox[0]), zmq.DONTWAIT)
            except zmq.Again:  # full: heartbeats repeat everything that matters
                self._outbox.clear()
                return
            self._outbox.popleft()

    def _receive_all(self, socket: zmq.Socket) -> None:
        handlers = {
            Welcome: self._on_welcome,
            Descriptor: self._on_descriptor,
            Pulse: self._on_pulse,
            Refused: self._on_refused,
        }
        while not self._is_fresh:
            try:
                raw = socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                record = WORKER_DECODER.decode(raw)
                with self._changed:
                    self._last_heard = time.monotonic()
                    handlers[type(record)](record)
                    self._changed.notify_all()
            except MessageError as error:
                _log.warning("message from the ring's owner dropped: %s", error)

    def _nudge(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _connect(endpoint: Path, identity: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(f"ipc://{endpoint}")
    return socket
