"""A ROUTER's messages: who sent them, in how many parts, and none where none is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.sockets import has_message, receive_from, send_to
from tests.rings import wait_until

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(f"ipc://{tmp_path / 'socket'}")
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, b"w")
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"ipc://{tmp_path / 'socket'}")
            yield router, dealer


@pytest.mark.parametrize("parts", [[b"a"], [b""], [b"a", b"b"], [b"a", b"", b"c" * 9999]])
def test_a_message_comes_with_its_sender_and_every_part(pair: Pair, parts: list[bytes]) -> None:
    router, dealer = pair
    for _ in range(2):
        dealer.send_multipart(parts)
    for _ in range(2):
        wait_until(lambda: has_message(router), "the message is there")
        assert receive_from(router) == [b"w", *parts]


def test_where_no_message_is_there_are_no_parts(pair: Pair) -> None:
    router, _ = pair
    assert not has_message(router)
    assert receive_from(router) == []


def test_a_message_goes_to_whom_it_is_for_and_to_nobody_else(pair: Pair) -> None:
    router, dealer = pair
    dealer.send(b"hello")
    wait_until(lambda: has_message(router), "the dealer is known")
    send_to(router, b"w", b"x")
    with pytest.raises(zmq.ZMQError):
        send_to(router, b"stranger", b"y")
    send_to(router, b"w", b"z")
    assert [dealer.recv_multipart(), dealer.recv_multipart()] == [[b"x"], [b"z"]]
