"""A condition that messages bring about: whoever waits for it listens at the sockets itself.

    ring thread       Watch.wait -> turn           waits for: its socket, a nudge, a moment
    waiting thread    wait_for -> turns            waits for: every socket, a notification (bounded)

ZeroMQ's sockets are not made for two threads at once, but threads may take turns behind a lock. So
no thread has to wake another one to hand it what a message brought: a waiting thread takes the ring
threads' place at their sockets, and they sleep on until it has left or their moment has come.

A turn leaves its socket with nothing to read. Only then does ZeroMQ make the socket's descriptor
readable when the next message comes.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq

_READABLE = int(zmq.POLLIN)


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received; where not, the next one makes the descriptor readable."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


class SocketCondition:
    """A lock, and a wait for a change of what it guards, be it by a thread or by a message."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._others = threading.Condition(self._lock)
        self._watches: dict[int, Watch] = {}
        """Of attached sockets, by descriptor."""
        self._is_listening = False
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell.descriptor, select.EPOLLIN)

    def notify_all(self) -> None:
        """Let every waiting thread look again; the caller holds the lock."""
        self._others.notify_all()
        if self._is_listening:
            self._bell.ring()

    def wait_for(self, predicate: Callable[[], Any], timeout: float) -> Any:
        """Wait until `predicate` holds or `timeout` is over; return its last result."""
        deadline = time.monotonic() + timeout
        while not (result := predicate()) and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        return result

    def wait(self, timeout: float) -> None:
        """Wait for a message or a notification; the caller holds the lock, once."""
        if self._is_listening:  # another thread is, and notifies
            self._others.wait(timeout)
            return
        for watch in self._watches.values():
            watch.mute()
        try:
            for descriptor in self._listen(timeout):
                if descriptor == self._bell.descriptor:
                    self._bell.silence()
                elif descriptor in self._watches:
                    self._watches[descriptor].turn()
        finally:
            for watch in self._watches.values():
                watch.unmute()

    def _listen(self, timeout: float) -> list[int]:
        """Return what can be read; others may have the lock meanwhile."""
        self._is_listening = True
        self._lock.release()
        try:
            return [descriptor for descriptor, _ in self._epoll.poll(timeout)]
        finally:
            self._lock.acquire()
            self._is_listening = False

    def add(self, descriptor: int, watch: "Watch") -> None:
        """Listen at a socket as well from here on."""
        self._watches[descriptor] = watch
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Listen at a socket no longer; it is still open."""
        del self._watches[descriptor]
        self._epoll.unregister(descriptor)

    def __enter__(self) -> "SocketCondition":
        self._lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class Bell:
    """Wakes a thread that polls; closed with its last reference, so never under a thread's poll."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """To be polled for reading, by one thread at a time."""

    def ring(self) -> None:
        """Wake the thread that polls, or the next one to."""
        os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        """Take back every ring so far, of which there is one at least: the poll has said so."""
        os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)


class Watch:
    """What one ring thread waits for; `turn` sends, receives and acts, and runs under the lock."""

    def __init__(self, condition: SocketCondition, turn: Callable[[], None]) -> None:
        self.turn = turn
        self._condition = condition
        self._descriptor: int | None = None
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell.descriptor, select.EPOLLIN)

    def attach(self, socket: "zmq.Socket[bytes]") -> None:
        """Watch a socket; the caller holds the lock."""
        descriptor = int(socket.getsockopt(zmq.FD))
        self._epoll.register(descriptor, select.EPOLLIN)
        self._condition.add(descriptor, self)
        self._descriptor = descriptor

    def detach(self) -> None:
        """Watch no socket, before that one is closed; the caller holds the lock."""
        if self._descriptor is not None:
            self._condition.remove(self._descriptor)
            self._epoll.unregister(self._descriptor)
            self._descriptor = None

    def wait(self, until: float) -> None:
        """Wait for a message, a nudge or a moment of the monotonic clock."""
        events = self._epoll.poll(max(0.0, until - time.monotonic()))
        if any(descriptor == self._bell.descriptor for descriptor, _ in events):
            self._bell.silence()

    def nudge(self) -> None:
        """Let the ring thread take a turn."""
        self._bell.ring()

    def mute(self) -> None:
        """Leave the socket to the thread that listens."""
        self._set_events(0)

    def unmute(self) -> None:
        """Wait for the socket again."""
        self._set_events(select.EPOLLIN)

    def _set_events(self, events: int) -> None:
        if self._descriptor is not None:
            self._epoll.modify(self._descriptor, events)
