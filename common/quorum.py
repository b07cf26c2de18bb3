"""The door to torchft's native module: a group's lighthouse, and a member's line to it.

torchft's package loads torch and a tracing library; its native module needs neither, so it is loaded
by itself: a quorum server starts at once and takes 16 MB.
"""

import importlib.machinery
import importlib.util
import json
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from common.config.environment import set_where_unset
from common.errors import ConfigError, PeerLostError
from common.lifecycle import write_atomically

HOW_TO_INSTALL = "needs torchft: install ringdraft with its extra `sync`, or set sync = 'none'"
_FILE = "quorum.json"
_TICK_MILLISECONDS = 50
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Member:
    """One of those who meet."""

    name: str
    """Sorts by index; unlike in each life of a worker."""
    store_address: str
    """`host:port` of a store in which this member's meetings can be arranged."""
    num_failures: int
    """Exchanges that failed for this member: members that differ from the last meeting's."""


@dataclass(frozen=True)
class Quorum:
    """Who meets, the same for all of them, in the order of their names."""

    key: str
    """Names this meeting."""
    members: tuple[Member, ...]


class Lighthouse:
    """Counts the members of one group."""

    def __init__(self, server: Any) -> None:
        self._server = server
        # Its own address has the machine's name, which may be one of another interface.
        self.url = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()


class LighthouseClient:
    """A member's line to the lighthouse. Each call may come from another thread."""

    def __init__(self, url: str) -> None:
        """Connect, or raise `PeerLostError`."""
        try:
            self._client = _native().LighthouseClient(url, timedelta(seconds=_CONNECT_SECONDS))
        except (RuntimeError, TimeoutError) as error:
            raise PeerLostError(f"quorum server {url}: no connection: {error}") from error

    def beat(self, name: str) -> None:
        """Say that the member lives, or raise `PeerLostError`."""
        try:
            self._client.heartbeat(name, timedelta(seconds=_CONNECT_SECONDS))
        except (RuntimeError, TimeoutError) as error:
            raise PeerLostError(f"quorum server: heartbeat of {name!r} failed: {error}") from error

    def meet(self, member: Member, step: int, timeout_seconds: float) -> Quorum:
        """Wait for the others and return who meets, or raise `PeerLostError`."""
        try:
            found = self._client.quorum(
                member.name,
                timedelta(seconds=timeout_seconds),
                address="",
                store_address=member.store_address,
                step=step,
                world_size=1,
                shrink_only=False,
                data={"num_failures": member.num_failures},
            )
        except (RuntimeError, TimeoutError) as error:
            raise PeerLostError(
                f"quorum server: no meeting for {member.name!r} in {timeout_seconds:g} s: {error}"
            ) from error
        members = sorted(
            (
                Member(
                    one.replica_id, one.store_address, int((one.data or {}).get("num_failures", 0))
                )
                for one in found.participants
            ),
            key=lambda one: one.name,
        )
        created = found.created
        key = f"{found.quorum_id}.{created.seconds}.{created.nanos}"
        return Quorum(key, tuple(members))


def is_installed() -> bool:
    """Whether torchft is there."""
    return importlib.util.find_spec("torchft") is not None


def start_lighthouse(lease_seconds: float, patience_seconds: float) -> Lighthouse:
    """Serve one group on a free port of loopback.

    Args:
        lease_seconds: silence after which a member is gone.
        patience_seconds: how long those who have come wait for one that lives and has not.
    """
    server = _native().LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=round(patience_seconds * 1000),
        quorum_tick_ms=_TICK_MILLISECONDS,
        heartbeat_timeout_ms=round(lease_seconds * 1000),
    )
    return Lighthouse(server)


def publish_addresses(run_directory: Path, urls: dict[str, str]) -> None:
    """Say in the run directory where each group's lighthouse is."""
    write_atomically(run_directory / _FILE, json.dumps({"groups": urls}), mode=0o600)


def withdraw_addresses(run_directory: Path) -> None:
    """Take back what `publish_addresses` said."""
    (run_directory / _FILE).unlink(missing_ok=True)


def read_address(run_directory: Path, group: str) -> str | None:
    """Return where a group's lighthouse is, or None where none is published."""
    try:
        url = json.loads((run_directory / _FILE).read_text(encoding="utf-8"))["groups"][group]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


@cache
def _native() -> ModuleType:
    """Load torchft's native module; raise `ConfigError` where it is not installed."""
    package = importlib.util.find_spec("torchft")
    places = list(package.submodule_search_locations or ()) if package is not None else []
    files = [file for place in places for file in Path(place).glob("_torchft*.so")]
    if not files:
        raise ConfigError(f"a synced group {HOW_TO_INSTALL}")
    set_where_unset({"RUST_LOG": "warn"})  # else it writes three lines for each step
    name = "torchft._torchft"
    spec = importlib.util.spec_from_file_location(name, files[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
