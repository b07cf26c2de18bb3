"""Connections that fail before their first message, which a socket tells nobody but its monitor."""

import struct
from collections.abc import Iterator

import zmq

SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
UNAUTHORIZED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
OTHER_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
CLOSED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_EVENT = struct.Struct("<HI")


class Handshakes:
    """The ends of a socket's handshakes; used by the thread that uses the socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        """Call it before the socket is bound or connected."""
        self._socket = socket
        self._monitor = socket.get_monitor_socket(
            SUCCEEDED | UNAUTHORIZED | OTHER_PROTOCOL | CLOSED
        )

    def ends(self) -> Iterator[int]:
        """Take the events since the last call, in order."""
        while self._monitor.poll(0):
            event, _ = _EVENT.unpack(self._monitor.recv_multipart()[0])
            yield event

    def close(self) -> None:
        """Stop watching, before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
