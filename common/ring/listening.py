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

# A message wakes one of the threads that listen for it: a waiting one, since its epoll is registered
# first, or else the ring thread. Should the kernel wake the other one, or both, they still take turns.
_TO_ONE_THREAD = select.EPOLLIN | select.EPOLLEXCLUSIVE


class SocketCondition:
    """A lock, and a wait for a change of what it guards, be it by a thread or by a message."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by whoever calls; taken directly where each row does."""
        self._others = threading.Condition(self.lock)
        self._watches: dict[int, Watch] = {}
        """Of attached sockets, by descriptor."""
        self._is_listening = False
        self.num_waiting = 0
        """Threads that wait here, the one that listens among them while it does."""
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell.descriptor, select.EPOLLIN)

    def notify_all(self) -> None:
        """Let every waiting thread look again; the caller holds the lock."""
        if self.num_waiting > self._is_listening:
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
            self.num_waiting += 1
            try:
                self._others.wait(timeout)
            finally:
                self.num_waiting -= 1
            return
        try:
            for descriptor, _ in self._listen(timeout):
                if descriptor == self._bell.descriptor:
                    self._bell.silence()
                elif descriptor in self._watches:
                    self._watches[descriptor].turn()
        except BaseException:  # what this thread was woken for, no other thread was
            for watch in self._watches.values():
                watch.nudge()
            raise

    def _listen(self, timeout: float) -> list[tuple[int, int]]:
        """Return what can be read; others may have the lock meanwhile."""
        self._is_listening = True
        self.num_waiting += 1
        self.lock.release()
        try:
            return self._epoll.poll(timeout)
        finally:
            self.lock.acquire()
            self.num_waiting -= 1
            self._is_listening = False

    def add(self, descriptor: int, watch: "Watch") -> None:
        """Listen at a socket as well from here on."""
        self._watches[descriptor] = watch
        self._epoll.register(descriptor, _TO_ONE_THREAD)

    def remove(self, descriptor: int) -> None:
        """Listen at a socket no longer; it is still open."""
        del self._watches[descriptor]
        self._epoll.unregister(descriptor)

    def __enter__(self) -> "SocketCondition":
        self.lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lock.release()


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
        """Watch a socket, after the waiting threads; the caller holds the lock."""
        descriptor = int(socket.getsockopt(zmq.FD))
        self._condition.add(descriptor, self)
        self._epoll.register(descriptor, _TO_ONE_THREAD)
        self._descriptor = descriptor

    def detach(self) -> None:
        """Watch no socket, before that one is closed; the caller holds the lock."""
        if self._descriptor is not None:
            self._condition.remove(self._descriptor)
            self._epoll.unregister(self._descriptor)
            self._descriptor = None

    def wait(self, until: float) -> bool:
        """Wait for a message, a nudge or a moment; return whether a message may have come.

        Args:
            until: the moment, on the monotonic clock.
        """
        has_come = False
        for descriptor, _ in self._epoll.poll(max(0.0, until - time.monotonic())):
            if descriptor == self._bell.descriptor:
                self._bell.silence()
            else:
                has_come = True
        return has_come

    def nudge(self) -> None:
        """Let the ring thread take a turn."""
        self._bell.ring()
