"""The two ends of a ring's socket: a ROUTER that is bound, a DEALER that is connected to it.

An endpoint is a path (an ipc socket, its file 0600) or a port. A port of the loopback is open to
every user of the machine, so it may have CURVE keys; every other port must.

The kernel tells both ends of a local socket when the other one dies, so there are no ZMTP
heartbeats: they would only cut off a peer that is stopped, and a ROUTER may not know it when it
comes back.
"""

import contextlib
import secrets
import socket as network
import time
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import zmq

from common.config.addresses import IPC, split_address
from common.config.shared import RingTable, RunTable
from common.contracts.codec import MAX_MESSAGE_BYTES
from common.errors import ConfigError
from common.ring import handshakes
from common.ring.curve import require_known_clients, show_client_key
from common.ring.handshakes import Handshakes
from common.sockets import bind_private

# A closed connection may be an owner's last one; so many in so short a time are a refusal.
_MOST_CLOSED = 5
_CLOSED_SECONDS = 10.0


@dataclass(frozen=True)
class TcpEndpoint:
    """A port of this machine, and the folder of the keys that whoever speaks there must have."""

    host: str
    port: int
    path: Path
    """A file that names the port while an owner is bound to it; a killed owner leaves it behind."""
    curve_directory: Path | None = None

    def __str__(self) -> str:
        return _url(self.host, self.port)


Endpoint = Path | TcpEndpoint


def ring_endpoint(run: RunTable, ring: RingTable, index: int) -> Endpoint:
    """Return where the run's target server number `index` is."""
    path = run.directory / f"target-{index}.sock"
    if ring.address == IPC:
        return path
    host, port = split_address(ring.address)
    if port + index > 65535:
        raise ConfigError(
            f"ring.address {ring.address!r}: target server {index} would be at port "
            f"{port + index}, expected at most 65535; choose a lower port"
        )
    return TcpEndpoint(host, port + index, path, ring.curve_directory)


# A larger message costs its sender the connection, uncounted. What is merely over the limit of a
# message is received, so that it can be counted as such.
_MOST_RECEIVED_BYTES = 4 * MAX_MESSAGE_BYTES


class Listener:
    """A ROUTER at an endpoint. Its file is removed at the end only while it is still this one's."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._path = endpoint if isinstance(endpoint, Path) else endpoint.path
        self._closing = contextlib.ExitStack()
        context = zmq.Context()
        self._closing.callback(context.term)
        self.socket = _open(context, zmq.ROUTER)
        self._closing.callback(self.socket.close, linger=0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._handshakes = Handshakes(self.socket)
        self._closing.callback(self._handshakes.close)
        try:
            self.replaced_another = self._path.exists()
            if isinstance(endpoint, Path):
                self._inode = bind_private(self.socket, endpoint)
            else:
                self._bind_port(context, endpoint)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            setting = "run.directory" if isinstance(endpoint, Path) else "ring.address"
            raise ConfigError(
                f"ring socket {endpoint}: {error}; choose another {setting}"
            ) from error
        except BaseException:
            self.close()
            raise

    def num_refused(self) -> int:
        """Return how many connections failed before their first message since the last call."""
        return sum(end != handshakes.SUCCEEDED for end in self._handshakes.ends())

    def close(self) -> None:
        """Close the socket."""
        self._closing.close()

    def unlink(self) -> None:
        """Remove the socket's file, unless a newer owner has put its own there."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind_port(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: TcpEndpoint) -> None:
        url = _numeric_url(self.socket, endpoint)
        if endpoint.curve_directory is not None:
            self._closing.callback(
                require_known_clients(context, self.socket, endpoint.curve_directory)
            )
        self.socket.bind(url)
        beside = self._path.with_name(f".{secrets.token_hex(4)}")
        beside.touch(0o600)
        beside.write_text(f"{endpoint}\n")
        self._inode = beside.stat().st_ino
        beside.replace(self._path)


class Caller:
    """A DEALER at an endpoint; nothing is queued for an owner that is not there."""

    def __init__(self, endpoint: Endpoint, identity: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self.socket = _open(self._context, zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._handshakes: Handshakes | None = None
        self._closed_at: list[float] = []
        try:
            self._connect(endpoint)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise `ConfigError` where the other end does not let this one in, and never will."""
        for end in self._handshakes.ends() if self._handshakes is not None else ():
            if end == handshakes.SUCCEEDED:
                self._closed_at.clear()
            elif end != handshakes.CLOSED or self._is_closed_once_more():
                raise ConfigError(f"ring {self._endpoint}: {_REFUSALS[end]}")

    def close(self, linger_milliseconds: int = 0) -> None:
        """Close the socket; what was sent has so long to leave this process."""
        if self._handshakes is not None:
            self._handshakes.close()
        self.socket.close(linger=linger_milliseconds)
        self._context.term()

    def _is_closed_once_more(self) -> bool:
        """Note a closed connection; return whether there have been too many of late."""
        now = time.monotonic()
        self._closed_at = [at for at in (*self._closed_at, now) if now - at < _CLOSED_SECONDS]
        return len(self._closed_at) >= _MOST_CLOSED

    def _connect(self, endpoint: Endpoint) -> None:
        if isinstance(endpoint, Path):
            self.socket.connect(f"ipc://{endpoint}")
            return
        url = _numeric_url(self.socket, endpoint)
        self._handshakes = Handshakes(self.socket)
        if endpoint.curve_directory is not None:
            show_client_key(self.socket, endpoint.curve_directory)
        self.socket.connect(url)


_REFUSALS = {
    handshakes.UNAUTHORIZED: "the target server does not know this worker's CURVE key; put "
    "clients/worker.key into the ring.curve_directory of the target server and start it again",
    handshakes.OTHER_PROTOCOL: "what listens there wants another security mechanism, with CURVE "
    "or without; give target servers and workers the same ring.curve_directory, or choose a port "
    "for ring.address that no other program has",
    handshakes.CLOSED: "what listens there closes every connection before its first message; give "
    "target servers and workers the same ring.curve_directory: with CURVE, server.key in this "
    "worker's must be the target server's",
}


def _open(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_RECEIVED_BYTES)
    return socket


def _numeric_url(socket: "zmq.Socket[bytes]", endpoint: TcpEndpoint) -> str:
    """Resolve the host, alike on both sides; refuse what only keys would protect."""
    try:
        found = network.getaddrinfo(endpoint.host, endpoint.port, type=network.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"ring.address {str(endpoint)!r}: {error.strerror}") from error
    family, address = found[0][0], str(found[0][4][0])
    if endpoint.curve_directory is None and not ip_address(address).is_loopback:
        raise ConfigError(
            f"ring.address {str(endpoint)!r} is {address}, not loopback: set ring.curve_directory "
            f"(docs/ring-protocol.md, Sockets), or use 'ipc' or 'tcp://127.0.0.1:<port>'"
        )
    if family == network.AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)
    return _url(address, endpoint.port)


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
