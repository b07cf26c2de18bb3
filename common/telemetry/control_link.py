"""A service's line to the control plane: heartbeats out, commands in, on a thread of its own.

    consumes    `ServiceState` from the service's callback, each interval
    produces    `ServiceHeartbeat` on `<run_dir>/control.sock`; commands to the service's callback
    waits for   the next interval, a reply, `report_soon()` or `close()`
    unblocked   by its timeout, always

Nothing is queued for a control plane that is not there: a heartbeat carries the whole state, so
the next one heals the loss. Training neither starts nor stops with the control plane.
"""

import contextlib
import faulthandler
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import zmq

from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.control_messages import (
    SERVICE_DECODER,
    Command,
    Phase,
    Report,
    ServiceGoodbye,
    ServiceHeartbeat,
    ServiceKind,
)
from common.contracts.placement_messages import GpuClaim, GpuGrant, GpuRefusal
from common.contracts.record import Record
from common.errors import MessageError

# How long a goodbye may wait for a control plane that does not read.
_LINGER_MILLISECONDS = 500
# How long a message may wait for the connection, such as the first one at start.
_CONNECT_MILLISECONDS = 100
_LEAST_INTERVAL_SECONDS = 0.05
_LOOK_SECONDS = 0.2
_QUEUED_MESSAGES = 16
_STDERR = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Who speaks on a link."""

    service: ServiceKind
    instance: str
    run: str


@dataclass(frozen=True)
class ServiceState:
    """What a heartbeat says of its service."""

    phase: Phase
    detail: str = ""
    progress: int = 0
    """Rises with each unit of work."""
    report: Report | None = None
    errors: tuple[str, ...] = ()


class ControlLink:
    """Reports a service to the control plane until `close`.

    `describe` and `on_command` run in the link's thread and must return at once: `describe`
    reads what the service last wrote down, `on_command` sets an event or fills a queue.
    Each command, known by its name and number, is given to `on_command` once; `stacks` is not, for
    the link answers it itself, whatever the service is stuck in.
    """

    def __init__(
        self,
        identity: Identity,
        socket_path: Path,
        *,
        interval_seconds: float,
        describe: Callable[[], ServiceState],
        on_command: Callable[[Command], None],
    ) -> None:
        self.session = secrets.randbits(64)
        self.identity = identity
        self.claim: GpuClaim | None = None
        """What heartbeats say of its place on a GPU."""
        self._interval = interval_seconds
        self._describe = describe
        self._on_command = on_command
        self._address = f"ipc://{socket_path.absolute()}"
        self._number = 0
        self._numbering = threading.Lock()
        self._answers: queue.SimpleQueue[tuple[int, GpuGrant | GpuRefusal]] = queue.SimpleQueue()
        self._seen_commands: set[tuple[str, int]] = set()
        self._goodbye: ServiceGoodbye | None = None
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="control-link", daemon=True)

    def start(self) -> "ControlLink":
        """Begin to report."""
        self._thread.start()
        return self

    def report_soon(self) -> None:
        """Send a heartbeat without waiting for the interval, such as after a change of phase."""
        os.eventfd_write(self._waker, 1)

    def ask_for_gpu(
        self, claim: GpuClaim, seconds: float, stop: threading.Event
    ) -> GpuGrant | GpuRefusal | None:
        """Repeat a claim in heartbeats and return the answer to it; None where none came in time.

        What answers an earlier claim is passed over.
        """
        with self._numbering:
            self.claim = claim
            first = self._number + 1
        self.report_soon()
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0 and not stop.is_set():
            with contextlib.suppress(queue.Empty):
                number, answer = self._answers.get(timeout=min(remaining, _LOOK_SECONDS))
                if number >= first:
                    return answer
        return None

    def close(self, exit_code: int, reason: str) -> None:
        """Send a last heartbeat and the goodbye, and end the thread; a second call does nothing."""
        if self._goodbye is not None:
            return
        self._goodbye = ServiceGoodbye(
            service=self.identity.service, instance=self.identity.instance,
            session=self.session, exit_code=exit_code, reason=reason,
        )  # fmt: skip
        self.report_soon()
        if self._thread.is_alive():
            self._thread.join(timeout=self._interval + 2 * _LINGER_MILLISECONDS / 1000)

    def __enter__(self) -> "ControlLink":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(
            int(value is not None), "" if value is None else f"{type(value).__name__}: {value}"
        )

    def _run(self) -> None:
        context = zmq.Context()
        line = _open_line(context, self._address)
        poller = zmq.Poller()
        poller.register(line, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        while self._goodbye is None:
            _send(line, self._heartbeat())
            self._serve_until(time.monotonic() + self._interval, line, poller)
        _send(line, self._heartbeat())
        _send(line, self._goodbye)
        line.close()
        context.term()

    def _serve_until(self, deadline: float, line: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        while (remaining := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, round(remaining * 1000))))
            if line in ready:
                self._receive(line)
            if self._waker in ready:
                os.eventfd_read(self._waker)
                return

    def _receive(self, line: zmq.Socket[bytes]) -> None:
        try:
            reply = SERVICE_DECODER.decode(line.recv(zmq.NOBLOCK))
        except zmq.Again:
            return
        except MessageError as error:
            _log.warning("reply of the control plane dropped: %s", error)
            return
        if reply.session != self.session:
            return
        self._interval = max(_LEAST_INTERVAL_SECONDS, reply.heartbeat_seconds)
        if reply.place is not None:
            self._answers.put((reply.number, reply.place))
        for command in sorted(reply.commands, key=lambda command: command.number):
            if (command.name, command.number) not in self._seen_commands:
                self._seen_commands.add((command.name, command.number))
                _log.info("command %s (number %d)", command.name, command.number)
                if command.name == "stacks":
                    faulthandler.dump_traceback(_STDERR, all_threads=True)
                else:
                    self._on_command(command)

    def _heartbeat(self) -> ServiceHeartbeat:
        state = self._describe()
        with self._numbering:
            self._number += 1
            number, claim = self._number, self.claim
        return ServiceHeartbeat(
            service=self.identity.service, instance=self.identity.instance,
            session=self.session, number=number, run=self.identity.run,
            pid=os.getpid(), host=socket.gethostname(), phase=state.phase, detail=state.detail,
            progress=state.progress, report=state.report, errors=state.errors,
            claim=claim,
        )  # fmt: skip


def _open_line(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    line = context.socket(zmq.DEALER)
    line.set(zmq.LINGER, _LINGER_MILLISECONDS)
    line.set(zmq.IMMEDIATE, 1)  # no queue for a control plane that is not there
    line.set(zmq.SNDHWM, _QUEUED_MESSAGES)
    line.set(zmq.RCVHWM, _QUEUED_MESSAGES)
    line.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    line.connect(address)
    return line


def _send(line: zmq.Socket[bytes], record: Record) -> None:
    line.poll(_CONNECT_MILLISECONDS, zmq.POLLOUT)
    try:
        line.send(encode(record), zmq.NOBLOCK)
    except zmq.Again:  # not connected, or it does not read: the next heartbeat says it all again
        _log.debug("%s not sent: the control plane is not there", type(record).__name__)
