"""A worker's side of one ring: leases in, releases out, heartbeats that heal.

    caller's thread   acquire -> copy -> verify -> release      waits for: a descriptor (bounded)
    ring thread       sessions, heartbeats; else as below       waits for: the socket, a beat
    unblocked by      acquire: a descriptor, a drained stream, a failure, close

Whoever holds the lock speaks at the socket: a caller sends its own messages, and hears what comes
while it waits (`listening`); the ring thread does both at all other times.

A lease covers one copy. After `release` its staging buffer stays busy until `return_buffer`; the
capacity in every message counts the buffers that are free or under a lease (R4).
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq

from common.contracts.codec import encode
from common.contracts.record import Record
from common.contracts.ring_messages import (
    WORKER_DECODER,
    Descriptor,
    NackReason,
    Pulse,
    Refused,
    Welcome,
)
from common.contracts.rows import RowSchema
from common.contracts.sequences import ONE_RING, SequenceSet, Shard
from common.errors import LayoutMismatchError, MessageError, SegmentError
from common.ring.backings import attach
from common.ring.endpoint import Caller, Endpoint
from common.ring.layout import SlotLayout
from common.ring.lease import Lease
from common.ring.listening import SocketCondition, Watch
from common.ring.segment import Segment
from common.ring.worker_protocol import WorkerProtocol
from common.sockets import has_message

HELLO_SECONDS = 0.5
# A Hello that cannot leave, since the owner is not there yet or the connection is being made.
_UNSENT_HELLO_SECONDS = 0.05
_BYE_LINGER_MILLISECONDS = 1000
# Messages of one turn, so that the lock is let go of in between.
_MESSAGES_A_TURN = 256
# An owner may go between its welcome and the attach; a /dev/shm that is not shared stays so.
_ATTACH_ATTEMPTS = 4
_log = logging.getLogger(__name__)


class RingConsumer:
    """One worker at one ring. `acquire` and `Lease` calls may come from any one thread.

    Sequences are the ring's own numbers; `Lease.sequence` is the one in the run.

    Args:
        changed: notified of every arrival; consumers that share it can be waited for together.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        worker_id: str,
        group: str,
        capacity: int,
        consumed: SequenceSet | None = None,
        shard: Shard = ONE_RING,
        changed: SocketCondition | None = None,
        gpu: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.shard = shard
        self._gpu = gpu
        self._lock = self._changed = changed or SocketCondition()
        self._watch = Watch(self._lock, self._turn)
        self._socket: zmq.Socket[bytes] | None = None
        """Of the session under way, used by whoever holds the lock."""
        self._protocol = WorkerProtocol(
            worker_id=worker_id, group=group, capacity=capacity, consumed=consumed, shard=shard
        )
        self.total_rows: int | None = None
        """Rows of the whole run, where an owner has told."""
        self._waiting: deque[Lease] = deque()
        self._segment: Segment | None = None
        self._layout: SlotLayout | None = None
        self._attach_failures = 0
        self._refused: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._last_heard = time.monotonic()
        self._next_hello = self._next_beat = 0.0
        self._stop = threading.Event()
        self._is_closed = False
        self._handlers: dict[type[Record], Callable[[Any], None]] = {
            Welcome: self._on_welcome,
            Descriptor: self._on_descriptor,
            Pulse: self._protocol.hear,
            Refused: self._on_refused,
        }
        self._thread = threading.Thread(target=self._run, name="ring-consumer", daemon=True)
        self._thread.start()

    # -- the worker's calls ----------------------------------------------------------------------

    def schema(self, timeout: float) -> RowSchema | None:
        """Wait for the owner's welcome; return the rows' schema, or None after `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout or self._has_ended(), timeout)
            return self.known_schema

    @property
    def known_schema(self) -> RowSchema | None:
        """The rows' schema, from the first welcome on."""
        with self._lock:
            self._raise_failure()
            return self._layout.schema if self._layout is not None else None

    @property
    def backing(self) -> str | None:
        """The kind of memory that the owner's ring is in, once welcomed."""
        segment = self._segment
        return segment.ref.backing if segment is not None else None

    def acquire(self, timeout: float) -> Lease | None:
        """READY -lease-> LEASED, by the owner: return the next lease, or None after `timeout`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._protocol.is_drained or self._has_ended(), timeout
            )
            return self.poll()

    def poll(self) -> Lease | None:
        """Return the next lease if one has come."""
        with self._lock:
            self._raise_failure()
            return self._waiting.popleft() if self._waiting else None

    def finish(self, lease: Lease, reason: NackReason | None) -> bool:
        """End a lease once, by release or requeue; return whether its copy is to be trained on."""
        with self._lock:
            was_open, lease.is_open = lease.is_open, False
            is_trainable = was_open and self._protocol.finish(lease.descriptor, reason)
            self._turn()
            return is_trainable

    def return_buffer(self) -> None:
        """A staging buffer is free again: ask for the next row at once."""
        with self._lock:
            self._protocol.return_buffer()
            self._turn()

    def mark_consumed(self, sequences: set[int]) -> None:
        """These sequences are in an applied optimizer step (R8)."""
        with self._lock:
            self._protocol.mark_consumed(sequences)

    def mark_committed(self, sequences: set[int] | None = None) -> None:
        """Every consumed sequence is in a durable checkpoint, or these of them are (R8)."""
        with self._lock:
            self._protocol.mark_committed(sequences)
            self._next_beat = 0.0
            self._turn()

    def forget(self, sequences: set[int]) -> None:
        """These were trained into weights that are gone: a fresh session gives them back (R8)."""
        with self._lock:
            if self._protocol.forget(sequences):
                self._begin_session()

    @property
    def consumed(self) -> SequenceSet:
        """What this worker's weights contain, together with all that is settled group-wide."""
        with self._lock:
            return self._protocol.consumed

    @property
    def is_settled(self) -> bool:
        """The stream has ended and nothing of the group is on its way: time to commit (R7)."""
        with self._lock:
            return self._protocol.is_settled

    @property
    def is_drained(self) -> bool:
        """Every row of the group is settled and committed (R7); once told, it stays so."""
        return self._protocol.is_drained

    @property
    def refused_messages(self) -> Counter[str]:
        """Messages of the owner that were dropped, by reason."""
        with self._lock:
            return self._refused.copy()

    @property
    def silent_seconds(self) -> float:
        """How long the owner has said nothing."""
        return time.monotonic() - self._last_heard

    def close(self, *, is_finished: bool = False) -> None:
        """Give back what is held, say goodbye, stop; a second call does nothing."""
        with self._changed:
            if self._is_closed:
                return
            for lease in self._waiting:
                lease.is_open = False
                self._protocol.finish(lease.descriptor, "stopping")
            self._waiting.clear()
            self._protocol.bye(is_finished=is_finished)
            self._stop.set()
            self._watch.nudge()
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._detach()

    # -- messages --------------------------------------------------------------------------------

    def _on_welcome(self, welcome: Welcome) -> None:
        protocol = self._protocol
        if protocol.welcome is not None or welcome.session != protocol.session:
            return
        try:
            is_attached = self._attach(welcome)
        except Exception:
            protocol.bye(welcome)
            raise
        if is_attached:
            protocol.welcome = welcome
            self.total_rows = welcome.total_rows
            self._next_beat = 0.0  # at once: it offers the buffers
            self._watch.nudge()  # it sleeps until the next Hello

    def _attach(self, welcome: Welcome) -> bool:
        """Map the owner's segment; return False where it is worth another Hello."""
        layout = SlotLayout(welcome.row_schema)
        needed = layout.slot_bytes * welcome.segment.num_slots
        if needed != welcome.segment.num_bytes:
            raise LayoutMismatchError(
                f"ring {self.endpoint}: got a segment of {welcome.segment.num_bytes} bytes, "
                f"expected {needed}; target server and worker are of different versions"
            )
        if self._layout is not None and self._layout.fingerprint != layout.fingerprint:
            raise LayoutMismatchError(
                f"ring {self.endpoint}: rows of another schema: "
                f"{welcome.row_schema.differences(self._layout.schema)}; the target server was "
                f"restarted with another target or data config, restart the workers as well"
            )
        try:
            self._segment = attach(welcome.segment, self._gpu)
        except SegmentError as error:
            self._attach_failures += 1
            if self._attach_failures >= _ATTACH_ATTEMPTS:
                raise
            _log.warning("ring %s: %s; say Hello again", self.endpoint, error)
            return False
        self._attach_failures = 0
        self._layout = layout
        return True

    def _on_descriptor(self, told: Descriptor) -> None:
        segment, layout = self._segment, self._layout
        if segment is not None and layout is not None and self._protocol.take(told):
            memory = segment.slot(told.lease.slot)
            self._waiting.append(Lease(self, told, memory, layout))

    def _on_refused(self, refused: Refused) -> None:
        if self._protocol.is_refused(refused):
            self._begin_session()

    def _begin_session(self) -> None:
        """Drop an ended session and its memory; copies that are under way keep theirs mapped."""
        self._protocol.begin_session(num_acquired=self._protocol.num_held - len(self._waiting))
        self._waiting.clear()
        self._detach()
        self._let_go_of_socket()
        self._next_hello = 0.0
        self._watch.nudge()

    def _detach(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    # -- the ring thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self._failure is None:
                self._serve_session()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            self._fail(error)

    def _serve_session(self) -> None:
        """Speak for one session, with a socket and an identity of its own."""
        session = self._protocol.session
        caller = Caller(self.endpoint, f"{self._protocol.worker_id}/{session:016x}")
        with self._lock:
            self._socket = caller.socket
            self._watch.attach(caller.socket)
        try:
            while self._socket is not None and self._failure is None:
                with self._lock:
                    is_last = self._stop.is_set()
                    self._turn()
                    caller.check()
                if is_last:
                    return
                self._watch.wait(self._next_beat if self._protocol.welcome else self._next_hello)
        finally:
            with self._lock:
                says_bye = self._socket is not None
                if self._socket is not None:
                    self._flush(self._socket)
                self._let_go_of_socket()
            caller.close(_BYE_LINGER_MILLISECONDS if says_bye else 0)

    def _turn(self) -> None:
        """Hear what has come and say what is due; the caller holds the lock.

        What goes wrong is raised where the worker calls next, whichever thread's turn this is.
        """
        try:
            for _ in range(_MESSAGES_A_TURN):
                socket = self._socket
                if socket is None:
                    return
                if has_message(socket):
                    self._receive(socket)
                elif not self._send_due(socket):
                    return
            self._watch.nudge()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            self._fail(error)

    def _send_due(self, socket: "zmq.Socket[bytes]") -> bool:
        """Return whether something was sent: while it was, a message may have come."""
        if not self._stop.is_set():
            self._say_due(time.monotonic())
        return self._flush(socket)

    def _flush(self, socket: "zmq.Socket[bytes]") -> bool:
        outbox = self._protocol.outbox
        if not outbox:
            return False
        try:
            while outbox:
                socket.send(encode(outbox[0]), zmq.DONTWAIT)
                outbox.popleft()
        except zmq.Again:  # no owner, or it does not read: heartbeats repeat all that matters
            outbox.clear()
            self._next_hello = time.monotonic() + _UNSENT_HELLO_SECONDS
        return True

    def _say_due(self, now: float) -> None:
        protocol = self._protocol
        if protocol.welcome is None and now >= self._next_hello:
            protocol.hello()
            self._next_hello = now + HELLO_SECONDS
        elif protocol.welcome is not None and now >= self._next_beat:
            if self._segment is not None and self._segment.is_removed():
                _log.warning("ring %s: its segment is gone; wait for the next owner", self.endpoint)
                self._begin_session()
                return
            protocol.beat()
            self._next_beat = now + protocol.welcome.heartbeat_seconds

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        raw = socket.recv(zmq.DONTWAIT)
        try:
            record = WORKER_DECODER.decode(raw)
            self._last_heard = time.monotonic()
            self._handlers[type(record)](record)
            self._changed.notify_all()
        except MessageError as error:
            self._refused[error.reason] += 1
            _log.warning("message from the ring's owner dropped: %s", error)

    def _let_go_of_socket(self) -> None:
        self._watch.detach()
        self._socket = None

    def _fail(self, error: BaseException) -> None:
        """Hand an error to the caller's thread, and stop."""
        _log.debug("ring %s failed", self.endpoint, exc_info=error)
        with self._changed:
            self._failure = error
            self._changed.notify_all()
            self._watch.nudge()

    def _has_ended(self) -> bool:
        return self._failure is not None or self._is_closed

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
