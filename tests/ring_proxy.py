"""A man in the middle of a ring's socket: a ROUTER for the workers, a DEALER a session for the owner.

Each message, either way, is lost, repeated, swapped with the next, delayed, truncated or corrupted
with the chances it is told, from a seed.
"""

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

_POLL_MILLISECONDS = 10


@dataclass(frozen=True)
class Noise:
    """The chance of each fault, for each message."""

    lost: float = 0.0
    repeated: float = 0.0
    swapped: float = 0.0
    delayed: float = 0.0
    truncated: float = 0.0
    corrupted: float = 0.0
    longest_delay_seconds: float = 0.3


QUIET = Noise()
SILENCE = Noise(lost=1.0)


class Proxy:
    """Carries messages between workers at `front` and an owner at `back`, until it is closed."""

    def __init__(self, front: Path, back: Path, noise: Noise = QUIET, seed: int = 0) -> None:
        self.noise = noise
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._back = back
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(f"ipc://{front}")
        self._front = front
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._pending: list[tuple[float, int, bool, bytes, bytes]] = []
        """Messages by the time at which they are due."""
        self._order = itertools.count()
        self._kept: dict[bool, tuple[bytes, bytes]] = {}
        """A message each way that waits for the next one to overtake it."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; messages under way are lost."""
        self._stop.set()
        self._thread.join()
        for socket in (self._router, *self._dealers.values()):
            socket.close(linger=0)
        self._context.term()
        self._front.unlink(missing_ok=True)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(_POLL_MILLISECONDS):
                if socket is self._router:
                    identity, body = self._router.recv_multipart()
                    if identity not in self._dealers:
                        self._dealers[identity] = self._dial(identity)
                        poller.register(self._dealers[identity], zmq.POLLIN)
                    self._take(identity, body, to_owner=True)
                else:
                    self._take(socket.identity, socket.recv(), to_owner=False)
            while self._pending and self._pending[0][0] <= time.monotonic():
                _, _, to_owner, identity, body = heapq.heappop(self._pending)
                self._send(identity, body, to_owner=to_owner)

    def _dial(self, identity: bytes) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.identity = identity
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.connect(f"ipc://{self._back}")
        return socket

    def _take(self, identity: bytes, body: bytes, *, to_owner: bool) -> None:
        for copy in self._mangle(body):
            delay = 0.0
            if self._happens("delayed", self.noise.delayed):
                delay = self._chance.random() * self.noise.longest_delay_seconds
            if to_owner not in self._kept and self._happens("swapped", self.noise.swapped):
                self._kept[to_owner] = (identity, copy)
                continue
            self._put(delay, identity, copy, to_owner=to_owner)
            if to_owner in self._kept:
                self._put(delay, *self._kept.pop(to_owner), to_owner=to_owner)

    def _mangle(self, body: bytes) -> Iterator[bytes]:
        """Yield what becomes of a message: nothing, or one or two of it."""
        noise = self.noise
        self.counts["messages"] += 1
        if self._happens("lost", noise.lost):
            return
        if self._happens("truncated", noise.truncated):
            body = body[: self._chance.randrange(len(body))]
        elif self._happens("corrupted", noise.corrupted):
            body = flip(body, self._chance)
        yield body
        if self._happens("repeated", noise.repeated):
            yield body

    def _happens(self, what: str, chance: float) -> bool:
        happens = self._chance.random() < chance
        self.counts[what] += happens
        return happens

    def _put(self, delay: float, identity: bytes, body: bytes, *, to_owner: bool) -> None:
        due = time.monotonic() + delay
        heapq.heappush(self._pending, (due, next(self._order), to_owner, identity, body))

    def _send(self, identity: bytes, body: bytes, *, to_owner: bool) -> None:
        try:
            if to_owner:
                self._dealers[identity].send(body, zmq.DONTWAIT)
            else:
                self._router.send_multipart([identity, body], zmq.DONTWAIT)
        except zmq.Again:
            self.counts["unsent"] += 1


def flip(body: bytes, chance: random.Random) -> bytes:
    """Return the message with one to four of its bytes changed."""
    changed = bytearray(body)
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)
