"""The control plane process: one socket for the services, one HTTP server for everyone else.

    services --heartbeats--> ControlSocket --> Registry <-- app <--HTTP-- people, Prometheus
             <--commands---                             (uvicorn, its own thread)

Start order: lock, token, port, sockets, then `<run_dir>/control.json`, so that who reads that
file finds a server. Nothing but the registry is shared between the two threads.
"""

import errno
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from pydantic import ValidationError

from common.config.shared import ControlPlaneTable
from common.contracts.control_messages import EvaluationResult
from common.errors import ConfigError, RingdraftError
from common.lifecycle import FileLock, write_atomically
from services.control_plane.app import Sources, create_app
from services.control_plane.config import ControlPlaneConfig
from services.control_plane.history import Recorder
from services.control_plane.hosts import names_of
from services.control_plane.readings import Readings
from services.control_plane.registry import Registry
from services.control_plane.socket import ControlSocket
from services.control_plane.status import Status
from services.control_plane.view import build_status

_CHECK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_BACKLOG = 128

_log = logging.getLogger(__name__)


class ControlPlane:
    """Serves a run's state until a stop request. Build it with `build`."""

    def __init__(self, parts: "Parts", stop: threading.Event) -> None:
        self._parts = parts
        self._stop = stop
        self._history = Recorder()
        readings = Readings(self.read_status)
        sources = Sources(readings, self._history, parts.registry, parts.token, parts.hosts, stop)
        self._http = HttpServer(uvicorn.Config(
            create_app(sources), log_config=None, log_level="warning", access_log=False, ws="none", lifespan="off",
            timeout_graceful_shutdown=1,
        ), parts.listener)  # fmt: skip

    def run(self) -> None:
        """Serve until the stop event is set."""
        parts = self._parts
        self._history.note("control", "", f"control plane serves, pid {os.getpid()}")
        self._history.take(self.read_status())  # before anyone has come
        try:
            parts.line.start()
            self._http.start()
            parts.publish()
            while not self._stop.wait(_CHECK_SECONDS):
                if not (parts.line.is_alive and self._http.is_alive):
                    raise RingdraftError("control plane: a server thread ended, see the log above")
                self._history.take(self.read_status())
        finally:
            parts.withdraw()
            self._http.close()
            parts.line.close()
            parts.lock.release()

    def read_status(self) -> Status:
        """Return the run's status at this moment."""
        snapshot = self._parts.registry.snapshot()
        return build_status(snapshot, self._parts.run, str(self._parts.directory))


@dataclass(frozen=True)
class Parts:
    """What a control plane is made of."""

    run: str
    directory: Path
    lock: FileLock
    token: str
    listener: socket.socket
    hosts: frozenset[str]
    registry: Registry
    line: ControlSocket

    def publish(self) -> None:
        """Say in the run directory where the server is."""
        url = _url_of(self.listener)
        write_atomically(
            self.directory / "control.json", json.dumps({"url": url, "pid": os.getpid()})
        )
        _log.info("serving on %s", url)

    def withdraw(self) -> None:
        """Take back what `publish` said."""
        (self.directory / "control.json").unlink(missing_ok=True)


class HttpServer:
    """Uvicorn in a thread, so that signals stay with the process's own stop event."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="http", daemon=True
        )

    def start(self) -> None:
        """Begin to answer; the listener has queued connections since it was bound."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop answering, after open requests or a second."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        self._listener.close()


def build(config: ControlPlaneConfig, stop: threading.Event) -> ControlPlane:
    """Take lock, token, port and socket, and return the control plane."""
    run, directory = config.run.name, config.run.directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(directory / "control.lock", f"control plane of run {run!r}").acquire(
        remedy="stop that one, or choose another run.directory"
    )
    token = read_or_make_token(directory / "control.token")
    listener = listen(config.control_plane, _last_port(directory / "control.json"))
    registry = Registry(run, config.control_plane.heartbeat_seconds, placement=config.placement)
    registry.add_evaluations(read_evaluations(directory / "evaluations"))
    # The lock above says that nobody answers here, so what lies there is a dead one's.
    line = ControlSocket(directory / "control.sock", registry)
    hosts = names_of(config.control_plane)
    return ControlPlane(Parts(run, directory, lock, token, listener, hosts, registry, line), stop)


def read_or_make_token(path: Path) -> str:
    """Return the bearer token, made at the first start and readable by its owner alone."""
    if not path.exists():
        write_atomically(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < 16:
        raise ConfigError(
            f"{str(path)!r}: got a token of {len(token)} characters, expected at least 16; "
            f"delete the file and a new one is made"
        )
    if path.stat().st_mode & 0o077:
        _log.warning("%s was readable by others; its mode is set to 0600", path)
        path.chmod(0o600)
    return token


def listen(table: ControlPlaneTable, last_port: int = 0) -> socket.socket:
    """Bind the HTTP port, or raise `ConfigError` naming the port and the setting.

    A port that was set is that one. Otherwise it is the one of the control plane that was killed here,
    whose address others know, or the default, or any where another process has them.
    """
    is_set = table.port and "port" in table.model_fields_set
    ports = [table.port] if is_set else [*([last_port] if last_port else []), table.port]
    for port in ports:
        try:
            return _bind(table, port)
        except ConfigError:
            if is_set or port == 0:
                raise
            _log.info("port %d is taken", port)
    return _bind(table, 0)


def _last_port(record: Path) -> int:
    """Return the port that a control plane which was killed has left, 0 without one."""
    try:
        return urlsplit(json.loads(record.read_text(encoding="utf-8"))["url"]).port or 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def _bind(table: ControlPlaneTable, port: int) -> socket.socket:
    where = f"control_plane.host={table.host!r} control_plane.port={port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            table.host, port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{where}: the host is not an address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_bound(where, port, error)) from error
    return listener


def read_evaluations(directory: Path) -> list[EvaluationResult]:
    """Return the results that an evaluator has left; a file that does not fit is skipped."""
    results = []
    for path in sorted(directory.glob("*.json")):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            known = {key: body[key] for key in EvaluationResult.model_fields if key in body}
            results.append(EvaluationResult.model_validate_json(json.dumps(known)))
        except (OSError, ValueError, TypeError, ValidationError) as error:
            _log.warning("evaluation %s skipped: %s", path.name, error)
    return results


def _why_not_bound(where: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where}: port {port} is in use by another process; set control_plane.port to a "
            f"free port, or to 0 for any"
        )
    return f"{where}: cannot be bound: {error.strerror}"


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:  # every address: name the one that this machine always has
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
