"""Anything on an owner's socket: refused and counted by its reason, and the ring goes on."""

import os
import random
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.ring_messages import OWNER_DECODER
from common.contracts.sequences import SequenceSet
from common.errors import MessageError
from common.ring.backings import BACKINGS
from common.ring.endpoint import Listener
from common.ring.owner import RingOwner
from tests.hostile import (
    OWNER_HEARS,
    REASONS,
    WORKER_HEARS,
    any_record,
    mutate,
    refused_messages,
)
from tests.ring_programs import check_accounts
from tests.rings import Reader, make_groups, make_schema, make_table, publish, wait_until

CHANCES = st.randoms(use_true_random=False)
# What an owner has heard stays heard: there is nothing to be gained from trying again with less.
ONCE = settings(deadline=None, phases=(Phase.generate,), database=None)

# Sessions that ask for nothing and claim nothing: any other would get rows, as it should.
IDLE = {"capacity": 0, "consumed": SequenceSet(), "staged": SequenceSet()}


@dataclass
class Siege:
    """An owner with an honest reader, and a socket that says what it likes."""

    owner: RingOwner
    reader: Reader
    endpoint: Path
    socket: "zmq.Socket[bytes]"
    next_sequence: int = 0

    def counts(self) -> Counter[str]:
        return Counter(self.owner.report().refused_messages)

    def say(self, raw: bytes) -> None:
        """Say something, and see that its reason is counted if it is to be refused."""
        before, reason = self.counts(), reason_to_refuse(raw)
        self.socket.send(raw)
        if reason is not None:
            wait_until(lambda: self.counts()[reason] > before[reason], f"{reason} is counted")

    def check(self) -> None:
        """The ring serves on, and its accounts hold."""
        publish(self.owner, self.next_sequence)
        taken = self.reader.next_row()
        assert taken == self.next_sequence
        self.next_sequence += 1
        check_accounts(self.owner.report())


def reason_to_refuse(raw: bytes) -> str | None:
    try:
        OWNER_DECODER.decode(raw)
    except MessageError as error:
        return error.reason
    return None


@pytest.fixture(scope="module")
def siege() -> Iterator[Siege]:
    """Lend one owner to all tests: nothing that was said to it before may matter."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder, zmq.Context() as context:
        endpoint = Path(folder) / "target-0.sock"
        with RingOwner(
            endpoint=endpoint, run=f"siege-{os.getpid()}", schema=make_schema(),
            table=make_table(session_timeout_seconds=60.0, lease_seconds=60.0, lease_max_seconds=60.0),
            groups=make_groups(), backing=BACKINGS["memory"],
        ) as owner, context.socket(zmq.DEALER) as dealer:  # fmt: skip
            dealer.linger = 0
            dealer.connect(f"ipc://{endpoint}")
            reader = Reader(endpoint, "honest")
            yield Siege(owner, reader, endpoint, dealer)
            reader.close()


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_a_refused_message_is_counted_by_its_reason_and_no_other(siege: Siege, reason: str) -> None:
    @settings(ONCE, max_examples=60)
    @given(chance=CHANCES)
    def refuses(chance: random.Random) -> None:
        before = siege.counts()
        siege.socket.send(refused_messages(OWNER_HEARS, chance)[reason])
        wait_until(lambda: siege.counts() != before, f"a message is counted as {reason}")
        assert siege.counts() - before == Counter({reason: 1})

    refuses()
    siege.check()


def test_broken_messages_end_no_owner_and_unbalance_no_account(siege: Siege) -> None:
    @settings(ONCE, max_examples=300)
    @given(chance=CHANCES)
    def survives(chance: random.Random) -> None:
        kind = chance.choice(OWNER_HEARS + WORKER_HEARS)
        raw = mutate(encode(any_record(kind, chance)), chance)
        if reason_to_refuse(raw) is not None:
            siege.say(raw)

    survives()
    siege.check()


def test_well_formed_nonsense_ends_no_owner_and_unbalances_no_account(siege: Siege) -> None:
    @settings(ONCE, max_examples=200)
    @given(chance=CHANCES)
    def survives(chance: random.Random) -> None:
        siege.say(encode(any_record(chance.choice(OWNER_HEARS), chance, **IDLE)))
        check_accounts(siege.owner.report())

    survives()
    siege.check()


def test_messages_of_several_parts_are_malformed(siege: Siege) -> None:
    before = siege.counts()["malformed"]
    for parts in ([b"", b""], [b"a", b"b", b"c"], [b"x"] * 100):
        siege.socket.send_multipart(parts)
    wait_until(lambda: siege.counts()["malformed"] == before + 3, "all three are counted")
    siege.check()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
RAW = {
    "nothing": b"",
    "zeros": bytes(5000),
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a greeting": GREETING[:20],
    "a greeting, then a frame of 2 EiB": GREETING + b"\x02" + b"\x1f" + b"\xff" * 7 + bytes(99),
    "a greeting, then a command that is none": GREETING + b"\x04\x10\x05READX" + bytes(10),
}


# ZeroMQ closes these without an event: it cannot cut their first bytes into frames.
UNREPORTED = {"zeros", "a greeting, then a frame of 2 EiB"}


@pytest.mark.parametrize("kind", RAW)
def test_bytes_that_are_no_zeromq_end_no_owner_and_are_counted(siege: Siege, kind: str) -> None:
    before = siege.counts()["handshake"]
    for number in range(20):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(siege.endpoint))
            try:
                peer.sendall(RAW[kind])
                peer.sendall(random.Random(number).randbytes(500))
            except (BrokenPipeError, ConnectionResetError):
                pass  # the owner hung up
    siege.check()
    if kind not in UNREPORTED:
        wait_until(lambda: siege.counts()["handshake"] >= before + 20, "each connection is counted")
        assert siege.counts()["handshake"] == before + 20


def test_peers_that_connect_and_say_nothing_do_not_keep_others_out(siege: Siege) -> None:
    peers = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for peer in peers:
            peer.connect(str(siege.endpoint))
        siege.check()
    finally:
        before = siege.counts()["handshake"]
        for peer in peers:
            peer.close()
    wait_until(lambda: siege.counts()["handshake"] == before + 200, "each connection is counted")


def test_a_flood_of_connections_keeps_no_owner_from_its_end() -> None:
    """More events than ZeroMQ would keep, while the ring thread takes none of them."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        endpoint, num_done = Path(folder) / "target-0.sock", 0
        listener = Listener(endpoint)
        while num_done < 3000:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(60)
                try:
                    peer.connect(str(endpoint))
                    num_done += 1
                    peer.sendall(RAW["a greeting, then a command that is none"])
                except BlockingIOError:  # its queue of connections is full
                    os.sched_yield()
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the owner hung up
        counted = 0

        def count() -> int:
            nonlocal counted
            counted += listener.num_refused()
            return counted

        wait_until(lambda: count() == 3000, "each connection is counted")
        listener.close()
        listener.unlink()


def test_a_flood_of_messages_does_not_keep_others_out(siege: Siege) -> None:
    before = siege.counts()["malformed"]
    for _ in range(5000):
        siege.socket.send(b"flood")
        if random.random() < 0.01:
            siege.check()
    siege.check()
    wait_until(lambda: siege.counts()["malformed"] == before + 5000, "each of them is counted")


def test_far_too_large_a_message_costs_its_sender_the_connection_only(siege: Siege) -> None:
    before = siege.counts()["oversized"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"ipc://{siege.endpoint}")
        dealer.send(bytes(8 * MAX_MESSAGE_BYTES))
        wait_until(
            lambda: monitor.poll(0) or siege.counts()["oversized"] > before, "the owner acts on it"
        )
        assert monitor.poll(0), "it was received"
        dealer.disable_monitor()
        monitor.close(linger=0)
        siege.check()
