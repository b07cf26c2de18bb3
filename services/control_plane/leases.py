"""GPU leases as the control plane knows them: what it granted, and what heartbeats say is held.

    none --claim--> granted --heartbeat with the hold--> held --goodbye, silence--> none
                       '------ its lock was another's, goodbye, silence ----------> none

Nothing is kept beside the sessions: a control plane that starts again has every lease back with the
first heartbeats, and grants nothing before two of them were due.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.contracts.control_messages import ServiceHeartbeat
from common.contracts.placement_messages import Gpu, GpuGrant, GpuRefusal
from common.placement.policy import Holder, PlacementPolicy, free_bytes


@dataclass(frozen=True)
class Lease:
    """A session's part in the places: its last heartbeat and what it was granted."""

    heartbeat: ServiceHeartbeat
    granted: str
    """UUID of a place that it has not confirmed; empty where there is none."""

    @property
    def holder(self) -> Holder | None:
        """The holder that it is, if it is one."""
        beat, claim = self.heartbeat, self.heartbeat.claim
        uuid = (claim.held or self.granted) if claim is not None else ""
        if claim is None or not uuid:
            return None
        return Holder(beat.service, beat.instance, uuid, claim.num_bytes)


@dataclass(frozen=True)
class GpuView:
    """A GPU or a MIG device that some live session sees, and who has it."""

    gpu: Gpu
    is_reserved: bool
    free_bytes: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class PlacesView:
    """All places at one moment."""

    gpus: tuple[GpuView, ...] = ()
    worker: GpuGrant | GpuRefusal | None = field(default=None)
    """Where one more worker like the largest one would go; None where no worker has a GPU."""


def answer_claim(
    policy: PlacementPolicy, own: Lease, others: Iterable[Lease]
) -> GpuGrant | GpuRefusal | None:
    """Return the answer to a session's claim; None where it asks for nothing."""
    claim = own.heartbeat.claim
    if claim is None or claim.held:
        return None
    if own.granted and own.granted not in claim.locked:
        return GpuGrant(gpu_uuid=own.granted)
    return policy.choose(own.heartbeat.service, claim, _holders(others))


def view_places(policy: PlacementPolicy, leases: Iterable[Lease]) -> PlacesView:
    """Return every place that live sessions see, and where one more worker would go."""
    leases = list(leases)
    holders = _holders(leases)
    gpus: dict[str, Gpu] = {}
    for lease in leases:
        gpus |= {
            gpu.uuid: gpu for gpu in (lease.heartbeat.claim.gpus if lease.heartbeat.claim else ())
        }
    views = tuple(
        GpuView(
            gpu, policy.is_reserved(gpu), free_bytes(gpu, holders),
            tuple(holder for holder in holders if holder.gpu_uuid == gpu.uuid),
        )
        for gpu in sorted(gpus.values(), key=lambda gpu: (gpu.index, gpu.parent, gpu.uuid))
        if not gpu.is_in_parts
    )  # fmt: skip
    claims = [
        lease.heartbeat.claim for lease in leases
        if lease.heartbeat.service == "drafter_worker" and lease.heartbeat.claim is not None
    ]  # fmt: skip
    if not claims:
        return PlacesView(views)
    largest = max(claims, key=lambda claim: claim.num_bytes)
    fresh = largest.model_copy(update={"gpus": tuple(gpus.values()), "held": "", "locked": ()})
    return PlacesView(views, policy.choose("drafter_worker", fresh, holders))


def _holders(leases: Iterable[Lease]) -> list[Holder]:
    return [holder for lease in leases if (holder := lease.holder) is not None]
