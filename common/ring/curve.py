"""CURVE keys of a ring's TCP sockets: who may connect, and who is connected to.

    <curve_directory>/server.key_secret           the target servers' own
                      server.key                  theirs, as workers know it
                      clients/worker.key_secret   the workers' own
                      clients/*.key               everybody who may connect

CURVE encrypts and authenticates the messages. Row bytes are in the memory of one machine and never
on a socket. What is not in order is refused at the start: a socket without its keys is never bound.
"""

from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.auth

from common.errors import ConfigError

_DOMAIN = "ring"
_KEY_CHARACTERS = 40
_FIX = "see docs/ring-protocol.md, Sockets, for the commands that make the keys"


def require_known_clients(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", directory: Path
) -> Callable[[], None]:
    """Let only holders of a key in `clients` connect; return what stops the thread that checks.

    Call it before the socket is bound.
    """
    # It brings an event loop along, which no ring without keys pays for.
    from zmq.auth.thread import ThreadAuthenticator

    public, secret = _load_pair(directory / "server.key_secret")
    clients = directory / "clients"
    known = sorted(clients.glob("*.key"))
    if not known:
        raise ConfigError(f"{str(clients)!r} has no *.key file, so no worker could connect; {_FIX}")
    for path in known:
        _load(path)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain=_DOMAIN, location=str(clients))
    # With a domain, libzmq refuses whoever the authenticator cannot be asked about.
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    return authenticator.stop


def show_client_key(socket: "zmq.Socket[bytes]", directory: Path) -> None:
    """Identify a worker's socket, and let it connect to the target servers' key alone."""
    public, secret = _load_pair(directory / "clients" / "worker.key_secret")
    server, _ = _load(directory / "server.key")
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        keys = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"CURVE key {str(path)!r} cannot be read: {error}; {_FIX}") from error
    for key in keys:
        if key is not None and len(key) != _KEY_CHARACTERS:
            raise ConfigError(
                f"CURVE key {str(path)!r}: got a key of {len(key)} characters, expected "
                f"{_KEY_CHARACTERS}; {_FIX}"
            )
    return keys


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"CURVE key {str(path)!r} has no secret key in it; {_FIX}")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"CURVE key {str(path)!r} has mode {mode:04o}, expected 0600: it is its owner's alone; "
            f"chmod 600 it, and make a new one if others had access"
        )
    return public, secret
