"""Sockets in the file system that their owner alone can use, and a ROUTER's messages.

Messages go by the methods that pyzmq's sockets inherit: those above them take as long again.
"""

import secrets
from pathlib import Path

import zmq
import zmq.backend

_AT_ONCE = int(zmq.DONTWAIT)
_MORE_AT_ONCE = int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_get = zmq.backend.Socket.get
_send = zmq.backend.Socket.send
_receive = zmq.backend.Socket.recv


def bind_private(socket: "zmq.Socket[bytes]", path: Path) -> int:
    """Bind at a path; return the inode of the socket's file, whose mode is 0600.

    It is bound beside the path, restricted, then moved into place: nobody finds it half made. What
    lies at the path is replaced, so the caller holds a lock that says it has no live owner.
    """
    beside = path.with_name(f".{secrets.token_hex(4)}")
    try:
        socket.bind(f"ipc://{beside}")
        beside.chmod(0o600)
        inode = beside.stat().st_ino
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return inode


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received; where not, the next one makes the descriptor readable."""
    return bool(int(_get(socket, zmq.EVENTS)) & _READABLE)


def send_to(socket: "zmq.Socket[bytes]", identity: bytes, message: bytes) -> None:
    """Send a message to a ROUTER's peer, or raise `zmq.ZMQError` where it cannot leave at once."""
    _send(socket, identity, _MORE_AT_ONCE)
    _send(socket, message, _AT_ONCE)


def receive_from(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """Return the next message of a ROUTER: its peer, and each part it has sent; [] where none is."""
    try:
        identity = _receive(socket, _AT_ONCE)
    except zmq.Again:
        return []
    frame = _receive(socket, _AT_ONCE, False)
    return [identity, frame.bytes, *(socket.recv_multipart(_AT_ONCE) if frame.more else ())]
