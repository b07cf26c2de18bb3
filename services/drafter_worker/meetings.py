"""Meetings of a group: who is there, and tensors between them over Gloo on loopback.

Sums of members that have a GPU each go between those, by NCCL (`gpu_sums`).

    main thread   open -> gather, sum, send, receive      waits for: the others, each time bounded
    beat thread   says to the lighthouse that this worker lives, while its main thread shows life
    unblocked by  the others; the death of one (its connection closes); the end of a lease or patience

A meeting fails as a whole: whoever lacks something of it raises `PeerLostError`, and the members
are counted and connected again. Who has it all goes on; the next meeting shows who is behind.
"""

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.config.shared import GroupTable
from common.errors import PeerLostError
from common.quorum import LighthouseClient, Member, Quorum, read_address
from services.drafter_worker.gpu_sums import GpuSums, are_apart, identity_of

_LOOPBACK = "127.0.0.1"
_AGREEMENT = "agreement"
_BEATS_A_LEASE = 5
_RETRY_SECONDS = 0.2
# More than the lighthouse itself waits, so that it answers before the caller hangs up.
_MARGIN_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Those who meet, connected. Calls are collective and in the same order at each member."""

    quorum: Quorum
    rank: int
    _group: Any
    """None: nobody else is there."""
    _gpus: GpuSums | None
    """None: sums are made in host memory."""
    _timeout: timedelta

    @property
    def size(self) -> int:
        """How many meet."""
        return len(self.quorum.members)

    def gather(self, part: Tensor) -> Tensor:
        """Return every member's part [n, ...] on the CPU, in the order of ranks."""
        if self._group is None:
            return part[None].clone()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _lost_on_failure("gather"):
            self._group.allgather([parts], [part]).wait()
        return torch.stack(parts)

    @property
    def place(self) -> torch.device:
        """Where vectors are summed."""
        return self._gpus.device if self._gpus is not None else torch.device("cpu")

    def sum(self, vector: Tensor) -> None:
        """Replace a float32 vector at `place` by the sum over members: bit-equal at each."""
        with _lost_on_failure("sum"):
            if self._gpus is not None:
                self._gpus.sum(vector)
            elif self._group is not None:
                self._group.allreduce([vector]).wait()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor on the CPU to one who receives it in the same shape."""
        with _lost_on_failure(f"send to member {rank}"):
            self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor on the CPU with what a member sends."""
        with _lost_on_failure(f"receive from member {rank}"):
            self._group.recv([tensor], rank, 0).wait()

    def agreement_of(self, rank: int) -> dict[str, Any]:
        """Return what another member's config says that all must have alike."""
        with _lost_on_failure(f"config of member {rank}"):
            store = _reach_store(self.quorum.members[rank].store_address, self._timeout)
            agreement = json.loads(store.get(_AGREEMENT))
        return dict(agreement)


class Meetings:
    """One worker's membership in its group. Use as a context manager."""

    def __init__(
        self,
        run_directory: Path,
        group: str,
        index: int,
        table: GroupTable,
        agreement: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._directory = run_directory
        self._group_name = group
        self._table = table
        self._timeout = timedelta(seconds=table.sync_transfer_seconds)
        # A name sorts by index, so that the lowest live index has rank 0.
        self.name = f"{index:05d}-{secrets.token_hex(6)}"
        self._store, self._address = _serve_store(self._timeout)
        self._store.set(_AGREEMENT, json.dumps(agreement))
        self._num_failures = 0
        self._said = ""
        """Why the last meeting failed; none has been held since."""
        self._client: LighthouseClient | None = None
        self._identity = identity_of(device)
        self._device = device
        self._group: Any = None
        self._gpus: GpuSums | None = None
        self._connected: tuple[Member, ...] = ()
        self._alive_at = time.monotonic()
        self._stop = threading.Event()
        self._beat_thread = threading.Thread(target=self._beat, name="sync-beat", daemon=True)

    def __enter__(self) -> "Meetings":
        self._beat_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave: the others miss this worker when its lease is over."""
        self._stop.set()
        self._beat_thread.join()
        self._disconnect()

    def touch(self) -> None:
        """The main thread lives: it may be waited for."""
        self._alive_at = time.monotonic()

    def open(self, step: int, patience_seconds: float | None = None) -> Meeting:
        """Wait for the others, connect where somebody came or left; raise `PeerLostError`.

        Args:
            patience_seconds: how long to wait at most; by default as long as the lighthouse does.
        """
        self.touch()
        self._client = self._client or self._reach_lighthouse()
        if patience_seconds is None:
            lease = self._table.sync_lease_seconds
            patience_seconds = self._table.sync_patience_seconds + lease + _MARGIN_SECONDS
        me = Member(self.name, self._address, self._num_failures)
        quorum = self._client.meet(me, step, patience_seconds)
        self.touch()
        rank = [member.name for member in quorum.members].index(self.name)
        if quorum.members != self._connected:
            self._connect(quorum, rank)
        return Meeting(quorum, rank, self._group, self._gpus, self._timeout)

    def fail(self, error: PeerLostError) -> None:
        """A meeting failed here: the next one connects again."""
        is_news, self._said = str(error) != self._said, str(error)
        level = logging.WARNING if is_news else logging.DEBUG  # it may fail many times a second
        _log.log(level, "meeting failed, the members are counted again: %s", error)
        self._num_failures += 1
        self._disconnect()
        self._client = None
        self._stop.wait(_RETRY_SECONDS)

    def _connect(self, quorum: Quorum, rank: int) -> None:
        self._disconnect()
        size = len(quorum.members)
        if size > 1:
            with _lost_on_failure(f"connect {size} members"):
                first = self._store if rank == 0 else None
                store = first or _reach_store(quorum.members[0].store_address, self._timeout)
                shared = dist.PrefixStore(quorum.key, store)
                self._group = _connect_gloo(shared, rank, size, self._timeout)
                self._gpus = self._connect_gpus(shared, rank, size)
        self._connected, self._said = quorum.members, ""
        way = "nothing" if size == 1 else "Gloo" if self._gpus is None else "NCCL"
        _log.info("meeting %s: rank %d of %d, sums over %s", quorum.key, rank, size, way)

    def _connect_gpus(self, store: dist.Store, rank: int, size: int) -> GpuSums | None:
        identities = [torch.empty_like(self._identity) for _ in range(size)]
        self._group.allgather([identities], [self._identity]).wait()
        if not are_apart(torch.stack(identities)):
            return None
        return GpuSums(dist.PrefixStore("nccl", store), rank, size, self._device, self._timeout)

    def _disconnect(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
        self._group, self._gpus, self._connected = None, None, ()

    def _reach_lighthouse(self) -> LighthouseClient:
        url = read_address(self._directory, self._group_name)
        if url is None:
            raise PeerLostError(
                f"group {self._group_name!r}: no quorum server in {str(self._directory)!r}; start "
                f"python -m services.quorum_server with the same config"
            )
        return LighthouseClient(url)

    def _beat(self) -> None:
        """Beat until `close`; not while the main thread hangs, which nobody should wait for."""
        client: LighthouseClient | None = None
        interval = self._table.sync_lease_seconds / _BEATS_A_LEASE
        while not self._stop.wait(interval):
            if time.monotonic() - self._alive_at > 2 * self._table.sync_patience_seconds:
                continue
            try:
                client = client or self._reach_lighthouse()
                client.beat(self.name)
            except PeerLostError:  # the main thread says so where it matters
                client = None


@contextlib.contextmanager
def _lost_on_failure(what: str) -> Iterator[None]:
    """Gloo and its store raise RuntimeError for everything."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(f"{what}: {str(error).splitlines()[0]}") from error


def _serve_store(timeout: timedelta) -> tuple[dist.TCPStore, str]:
    """Serve a store on loopback alone; return it and its address."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, f"{_LOOPBACK}:{port}"


def _reach_store(address: str, timeout: timedelta) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _connect_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect members; Gloo would else choose the interface that the machine's name stands for."""
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, size, options)
