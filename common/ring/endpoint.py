"""The two ends of a ring's socket: a ROUTER bound to a path, a DEALER connected to it.

The kernel tells both ends of an ipc socket when the other one dies, so there are no ZMTP heartbeats:
they would only cut off a peer that is stopped, and a ROUTER may not know it when it comes back.
"""

import contextlib
import secrets
from pathlib import Path

import zmq

from common.contracts.codec import MAX_MESSAGE_BYTES
from common.errors import ConfigError

# A larger message costs its sender the connection, uncounted. What is merely over the limit of a
# message is received, so that it can be counted as such.
_MOST_RECEIVED_BYTES = 4 * MAX_MESSAGE_BYTES


class Listener:
    """A ROUTER at a path. Its file is removed at close only while it is still this one's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context = zmq.Context()
        self.socket = _open(self._context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.replaced_another = path.exists()
            self._inode = self._bind()
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigError(
                f"ring socket {path}: {error}; choose another run.directory"
            ) from error

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.socket.close(linger=0)
        self._context.term()

    def unlink(self) -> None:
        """Remove the socket's file, unless a newer owner has put its own there."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind(self) -> int:
        """Bind beside the path, restrict, move into place: nobody finds it half made.

        The caller holds the run's lock, so a file that is at the path has no live owner.
        """
        beside = self._path.with_name(f".{secrets.token_hex(4)}")
        try:
            self.socket.bind(f"ipc://{beside}")
            beside.chmod(0o600)
            inode = beside.stat().st_ino
            beside.replace(self._path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return inode


class Caller:
    """A DEALER at a path; nothing is queued for an owner that is not there."""

    def __init__(self, path: Path, identity: str) -> None:
        self._context = zmq.Context()
        self.socket = _open(self._context, zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self.socket.connect(f"ipc://{path}")

    def close(self, linger_milliseconds: int = 0) -> None:
        """Close the socket; what was sent has so long to leave this process."""
        self.socket.close(linger=linger_milliseconds)
        self._context.term()


def _open(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_RECEIVED_BYTES)
    return socket
