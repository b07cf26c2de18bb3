"""Which GPU a process gets. Pure: the same claim and holders give the same answer.

The control plane asks it with all leases that it knows; a process that no control plane answers asks
it with the locks of the run directory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.config.shared import PlacementTable
from common.contracts.control_messages import ServiceKind
from common.contracts.placement_messages import Gpu, GpuClaim, GpuGrant, GpuRefusal

_GIB = 1 << 30


@dataclass(frozen=True)
class Holder:
    """Who has a lease on a GPU."""

    service: ServiceKind
    instance: str
    gpu_uuid: str
    num_bytes: int = 0
    """Estimated; 0 where it is not known."""


@dataclass(frozen=True)
class _Obstacle:
    text: str
    remedy: str


class PlacementPolicy:
    """Chooses among the GPUs that a process sees.

    A worker or an evaluator gets, of those that are no GPU of the targets', have fewer workers than
    `workers_per_gpu` and enough memory, the one with the fewest leases, then the most free memory. A
    target gets a reserved GPU first, then one with the fewest targets, then in the same order. What a
    GPU has free is the lesser of what the driver says and what its holders' estimates leave: who was
    placed a moment ago has allocated nothing yet.
    """

    def __init__(self, table: PlacementTable) -> None:
        self._table = table

    def choose(
        self, service: ServiceKind, claim: GpuClaim, holders: Sequence[Holder]
    ) -> GpuGrant | GpuRefusal:
        """Return the place to take, or why each GPU is none."""
        obstacles = {gpu: self._obstacle(service, gpu, claim, holders) for gpu in claim.gpus}
        places = [gpu for gpu, obstacle in obstacles.items() if obstacle is None]
        if places:
            order = [self._rank(service, gpu, holders) for gpu in places]
            return GpuGrant(gpu_uuid=places[order.index(min(order))].uuid)
        return GpuRefusal(reason=_refuse(service, obstacles))

    def is_reserved(self, gpu: Gpu) -> bool:
        """Whether only targets take it."""
        return any(_names(entry, gpu) for entry in self._table.reserved_for_targets)

    def _obstacle(
        self, service: ServiceKind, gpu: Gpu, claim: GpuClaim, holders: Sequence[Holder]
    ) -> _Obstacle | None:
        if gpu.is_in_parts:
            return _Obstacle(
                "is in MIG mode, and its MIG devices are the places",
                "make MIG devices (nvidia-smi mig -cgi) or switch the mode off (nvidia-smi -mig 0)",
            )
        if service != "target_server" and self.is_reserved(gpu):
            return _Obstacle("is kept for targets", "take it out of placement.reserved_for_targets")
        limit = self._table.workers_per_gpu
        workers = [h.instance for h in _on(gpu, holders) if h.service == "drafter_worker"]
        if service == "drafter_worker" and limit and len(workers) >= limit:
            return _Obstacle(
                f"has {len(workers)} of {limit} workers ({', '.join(sorted(workers))})",
                "raise placement.workers_per_gpu",
            )
        if gpu.uuid in claim.locked:
            return _Obstacle(
                "has all its places locked by processes of which nothing is heard",
                "see <run_dir>/gpus for their pids",
            )
        free = free_bytes(gpu, holders)
        if self._table.check_memory and free < claim.num_bytes:
            return _Obstacle(
                f"has {free / _GIB:.1f} GiB free of the {claim.num_bytes / _GIB:.1f} GiB that it takes",
                "free memory, make what runs there smaller, or set placement.check_memory = false where "
                "the estimate is wrong",
            )
        return None

    def _rank(
        self, service: ServiceKind, gpu: Gpu, holders: Sequence[Holder]
    ) -> tuple[bool, int, int, int]:
        on_it = _on(gpu, holders)
        is_target = service == "target_server"
        targets = [holder for holder in on_it if holder.service == "target_server"]
        return (
            is_target and not self.is_reserved(gpu),
            len(targets) if is_target else 0,
            len(on_it),
            -free_bytes(gpu, holders),
        )


def free_bytes(gpu: Gpu, holders: Sequence[Holder]) -> int:
    """Return what a GPU has for another process, as far as is known."""
    left = gpu.total_bytes - sum(holder.num_bytes for holder in _on(gpu, holders))
    return max(0, min(gpu.free_bytes, left))


def _on(gpu: Gpu, holders: Sequence[Holder]) -> list[Holder]:
    return [holder for holder in holders if holder.gpu_uuid == gpu.uuid]


def _names(entry: int | str, gpu: Gpu) -> bool:
    if isinstance(entry, int):
        return gpu.index == entry
    return gpu.uuid.startswith(entry) or gpu.parent.startswith(entry)


def _refuse(service: ServiceKind, obstacles: dict[Gpu, _Obstacle | None]) -> str:
    known = {gpu: obstacle for gpu, obstacle in obstacles.items() if obstacle is not None}
    if not known:
        return f"no GPU for this {service}: it sees none; look at CUDA_VISIBLE_DEVICES"
    each = "; ".join(f"{g.uuid} ({g.index}, {g.name}) {known[g].text}" for g in known)
    remedies = "; or ".join(dict.fromkeys(obstacle.remedy for obstacle in known.values()))
    return f"no GPU for this {service}: {each}. To change it: {remedies}; or show it more GPUs"
