"""Threads that take turns at a socket: who hears a message, who wakes, and that none is left lying."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.ring.listening import SocketCondition, Watch
from common.sockets import has_message
from tests.rings import WATCHDOG_SECONDS, wait_until

# Beyond the time limit of a test: whatever waits for so long is woken, or the test fails.
LONG = 600.0


class Station:
    """A socket, the thread that serves it, and what came with the names of the threads it came by."""

    def __init__(self, condition: SocketCondition, address: str) -> None:
        self.condition = condition
        self.heard: list[tuple[bytes, str]] = []
        self.num_waits = 0
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.watch = Watch(condition, self.turn)
        self._stop = threading.Event()
        with condition:
            self.watch.attach(self.socket)
        self._thread = threading.Thread(target=self._serve, name="ring")
        self._thread.start()

    def turn(self) -> None:
        while has_message(self.socket):
            self.heard.append((self.socket.recv(), threading.current_thread().name))
            self.condition.notify_all()

    def has(self, count: int) -> bool:
        return len(self.heard) >= count

    def say(self, message: bytes) -> None:
        with self.condition:
            self.socket.send(message)
            self.turn()

    def _serve(self) -> None:
        while not self._stop.is_set():
            self.watch.wait(time.monotonic() + LONG)
            self.num_waits += 1
            with self.condition:
                self.turn()

    def close(self) -> None:
        self._stop.set()
        self.watch.nudge()
        self._thread.join(WATCHDOG_SECONDS)
        with self.condition:
            self.watch.detach()
        self.socket.close()
        self._context.term()


@contextlib.contextmanager
def opened(folder: Path, *names: str) -> Iterator[tuple[SocketCondition, list[Station], list]]:
    """Open stations that share a condition, and the other ends of their sockets."""
    condition = SocketCondition()
    with contextlib.ExitStack() as stack:
        stations, peers = [], []
        context = stack.enter_context(zmq.Context())
        for name in names:
            address = f"ipc://{folder / name}"
            stations.append(stack.enter_context(contextlib.closing(Station(condition, address))))
            peer = stack.enter_context(context.socket(zmq.DEALER))
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(address)
            peers.append(peer)
            peer.send(b"hello")
            wait_until(lambda station=stations[-1]: station.has(1), "the peer is connected")
            stations[-1].heard.clear()
        yield condition, stations, peers


@pytest.fixture
def one(tmp_path: Path) -> Iterator[tuple[SocketCondition, Station, "zmq.Socket[bytes]"]]:
    with opened(tmp_path, "a") as (condition, (station,), (peer,)):
        yield condition, station, peer


def test_a_message_that_nobody_waits_for_is_heard_by_the_ring_thread(one) -> None:
    _, station, peer = one
    peer.send(b"x")
    wait_until(lambda: station.has(1), "it is heard")
    assert station.heard == [(b"x", "ring")]


def test_a_waiting_thread_hears_its_messages_itself_while_the_ring_thread_sleeps(one) -> None:
    condition, station, peer = one
    me = threading.current_thread().name
    waits = station.num_waits
    for count in range(1, 21):
        sender = threading.Timer(0.01, peer.send, [b"x"])
        sender.start()
        with condition:
            assert condition.wait_for(lambda count=count: station.has(count), LONG)
        sender.join()
    assert station.heard == [(b"x", me)] * 20
    assert station.num_waits == waits


def test_the_ring_thread_listens_again_when_the_waiting_thread_has_left(one) -> None:
    condition, station, peer = one
    with condition:
        assert not condition.wait_for(lambda: False, 0.05)
    peer.send(b"x")
    wait_until(lambda: station.has(1), "it is heard")
    assert station.heard == [(b"x", "ring")]


def test_a_message_that_comes_while_the_waiting_thread_leaves_is_heard(one) -> None:
    condition, station, peer = one
    for count in range(1, 201):
        with condition:
            peer.send(b"x")
            condition.wait_for(lambda count=count: station.has(count), 0.0001)
        wait_until(lambda count=count: station.has(count), "no message is left lying")


def test_a_message_whose_turn_failed_is_heard_by_the_ring_thread(one) -> None:
    condition, station, peer = one

    def fail() -> None:
        raise ZeroDivisionError

    station.watch.turn = fail
    sender = threading.Timer(0.05, peer.send, [b"x"])
    sender.start()
    with condition, pytest.raises(ZeroDivisionError):
        condition.wait_for(lambda: False, LONG)
    sender.join()
    wait_until(lambda: station.has(1), "no message is left lying")
    assert station.heard == [(b"x", "ring")]


def test_a_wait_ends_with_a_notification_and_with_its_time(one) -> None:
    condition, _, _ = one
    told = threading.Event()

    def tell() -> None:
        with condition:
            told.set()
            condition.notify_all()

    with condition:
        began_at = time.monotonic()
        assert not condition.wait_for(told.is_set, 0.05)
        assert time.monotonic() - began_at >= 0.05
        timer = threading.Timer(0.05, tell)
        timer.start()
        assert condition.wait_for(told.is_set, LONG)
    timer.join()


def test_a_notification_is_over_when_it_was_heard(one) -> None:
    condition, station, _ = one
    looks: list[int] = []
    waits = station.num_waits
    station.watch.nudge()

    def look() -> bool:
        looks.append(1)
        if len(looks) == 1:
            timer.start()
        return False

    def tell() -> None:
        with condition:
            condition.notify_all()

    timer = threading.Timer(0.05, tell)
    with condition:
        condition.wait_for(look, 0.2)
    timer.join()
    assert len(looks) == 3  # at first, when told, at the end
    assert waits < station.num_waits < waits + 5  # for the nudge, and for the peer's greeting


def test_two_threads_wait_at_once_and_both_see_the_message(one) -> None:
    condition, station, peer = one
    saw: list[bool] = []

    def wait() -> None:
        with condition:
            saw.append(condition.wait_for(lambda: station.has(1), LONG))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    peer.send(b"x")
    for thread in threads:
        thread.join(WATCHDOG_SECONDS)
    assert saw == [True] * 3


def test_one_thread_waits_for_several_sockets(tmp_path: Path) -> None:
    with opened(tmp_path, "a", "b") as (condition, stations, peers):
        for station, peer in zip(stations, peers, strict=True):
            sender = threading.Timer(0.02, peer.send, [b"x"])
            sender.start()
            with condition:
                assert condition.wait_for(lambda station=station: station.has(1), LONG)
            sender.join()
        assert {name for station in stations for _, name in station.heard} == {
            threading.current_thread().name
        }


def test_a_socket_that_is_attached_during_a_wait_is_listened_at(tmp_path: Path) -> None:
    condition = SocketCondition()
    late: list[Station] = []
    address = f"ipc://{tmp_path / 'late'}"
    timer = threading.Timer(0.05, lambda: late.append(Station(condition, address)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(address)
        peer.send(b"x")
        timer.start()
        with condition:
            assert condition.wait_for(lambda: late and late[0].has(1), LONG)
        timer.join()
        late[0].close()


def test_no_message_is_left_lying_however_threads_take_turns(one) -> None:
    """Sending takes a message's signal off the socket: whoever sends has to look for messages."""
    condition, station, peer = one
    rounds, num_threads = 1500, 3
    stop = threading.Event()

    def echo() -> None:
        for _ in range(rounds * num_threads):
            peer.send(peer.recv())

    def chatter() -> None:
        for _ in range(rounds):
            station.say(b"x")

    def listen() -> None:
        while not stop.is_set():
            with condition:
                condition.wait_for(lambda: station.has(rounds * num_threads), 0.001)

    talkers = [threading.Thread(target=chatter) for _ in range(num_threads)]
    others = [threading.Thread(target=echo), threading.Thread(target=listen)]
    for thread in (*talkers, *others):
        thread.start()
    for thread in talkers:
        thread.join(WATCHDOG_SECONDS)
    stop.set()
    wait_until(lambda: station.has(rounds * num_threads), "every echo is heard")
    for thread in others:
        thread.join(WATCHDOG_SECONDS)
