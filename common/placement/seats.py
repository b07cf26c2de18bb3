"""Places as locks in the run directory: `gpus/<uuid>.<service>.<number>`, one a process.

A lease that the control plane grants is held by such a lock, so that no GPU has more workers than it
may whatever the control plane has heard: while it is down, after it has started again, and when a
process is silent and lives. The kernel frees a lock with its process. Containers of a run share the
directory.

    one process at a time: choose --> lock the lowest number of the place --> keep it to the end
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from common.config.shared import PlacementTable
from common.contracts.control_messages import ServiceKind
from common.errors import PlacementError
from common.lifecycle import FileLock, claim_lowest, describe_holder, lock_holder
from common.placement.policy import Holder

_MOST_ON_A_GPU = 64
_TRY_SECONDS = 0.02
_PATIENCE_SECONDS = 30.0
_SERVICES: tuple[ServiceKind, ...] = ("target_server", "drafter_worker", "evaluator")


class Seats:
    """The locks of a run. Use it under `one_at_a_time`, since to look at a lock is to take it."""

    def __init__(self, run_directory: Path, table: PlacementTable) -> None:
        self._directory = run_directory / "gpus"
        self._table = table

    @contextlib.contextmanager
    def one_at_a_time(self, holder: str) -> Iterator[None]:
        """Wait for others that choose; they take milliseconds."""
        path = self._directory / "choosing.lock"
        lock, pause = FileLock(path, holder), threading.Event()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not lock.try_acquire():
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"{str(path)!r} is held by {describe_holder(path)} for {_PATIENCE_SECONDS:g} s: it "
                    f"is stopped or stuck; end that process"
                )
            pause.wait(_TRY_SECONDS)
        with lock:
            yield

    def take(self, gpu_uuid: str, service: ServiceKind, instance: str) -> FileLock | None:
        """Take a place on a GPU; None where each has its holder."""
        limit = self._table.workers_per_gpu if service == "drafter_worker" else 0
        numbers = range(limit or _MOST_ON_A_GPU)
        paths = (self._directory / f"{_file_name(gpu_uuid)}.{service}.{n}" for n in numbers)
        claimed = claim_lowest(paths, instance)
        return claimed[1] if claimed else None

    def holders(self, gpu_uuids: list[str]) -> list[Holder]:
        """Return who holds places on these GPUs; what they take is not known."""
        return [
            Holder(service, describe_holder(path), uuid)
            for uuid in gpu_uuids
            for service in _SERVICES
            for path in sorted(self._directory.glob(f"{_file_name(uuid)}.{service}.*"))
            if lock_holder(path) is not None
        ]


def _file_name(gpu_uuid: str) -> str:
    return gpu_uuid.replace("/", "_")  # MIG-GPU-<uuid>/<gi>/<ci> of older drivers
