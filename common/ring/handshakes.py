"""Connections that fail before their first message, which a socket tells nobody but its monitor."""

import struct
from collections.abc import Iterator

import zmq

from common.sockets import has_message

SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
UNAUTHORIZED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
OTHER_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
CLOSED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
# One watched socket a context.
_ADDRESS = "inproc://handshakes"
_EVENT = struct.Struct("<HI")


class Handshakes:
    """The ends of a socket's handshakes; used by the thread that uses the socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        """Call it before the socket is bound or connected."""
        self._socket = socket
        socket.monitor(_ADDRESS, SUCCEEDED | UNAUTHORIZED | OTHER_PROTOCOL | CLOSED)
        self._monitor = socket.context.socket(zmq.PAIR)
        # No bound: ZeroMQ's own thread waits for room here, and with it every connection, for ever
        # where the socket is closed meanwhile.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(_ADDRESS)

    def ends(self) -> Iterator[int]:
        """Take the events since the last call, in order."""
        while has_message(self._monitor):
            event, _ = _EVENT.unpack(self._monitor.recv_multipart()[0])
            yield event

    def close(self) -> None:
        """Stop watching, before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
