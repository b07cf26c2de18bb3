"""What one more worker, or one more target server, would give. Pure arithmetic on one snapshot.

A side's capacity is what it would do if it never waited: its rate over the last seconds, divided by
the share of them in which it did not wait. Rows go to every group, so the group with the least
capacity holds the others and the targets up:

    throughput = e * min(targets, slowest group)    e, the observed part of that, is at most 1 and stays
    one more worker adds the mean capacity of the slowest group's workers to it, one more target that
    of the targets; the other groups stay what they are

Left out: what sharing a GPU, memory or cores costs, and meetings of a synced group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.contracts.placement_messages import GpuGrant, GpuRefusal
from services.control_plane.health import BottleneckName
from services.control_plane.status import AdviceStatus

# A side that waited for nearly all of the time is not taken to be more times faster than this.
_LEAST_BUSY_SHARE = 0.02
# Below this part, one more is no gain.
_GAIN = 1.02


@dataclass(frozen=True)
class Rate:
    """What one target or worker did over the last seconds."""

    tokens_per_second: float
    wait_share: float

    @property
    def capacity(self) -> float:
        """Tokens a second if it never waited."""
        return self.tokens_per_second / max(_LEAST_BUSY_SHARE, 1.0 - self.wait_share)


def advise(
    name: BottleneckName,
    targets: Sequence[Rate],
    groups: Mapping[str, Sequence[Rate]],
    place: GpuGrant | GpuRefusal | None,
) -> AdviceStatus | None:
    """Return what to add; None while a side has not been seen to run.

    Args:
        place: where one more worker would go; None where workers have no GPUs.
    """
    if not targets or not groups or not all(groups.values()):
        return None
    capacities = {group: _sum(rates) for group, rates in groups.items()}
    slowest = min(capacities, key=lambda group: capacities[group])
    made, trained = _sum(targets), capacities[slowest]
    others = [capacity for group, capacity in capacities.items() if group != slowest]
    now = sum(rate.tokens_per_second for rate in groups[slowest])
    limit = min(made, trained)
    share = min(1.0, now / limit) if limit else 0.0
    more_workers = share * min(made, trained + trained / len(groups[slowest]), *others)
    more_targets = share * min(made + made / len(targets), *capacities.values())
    figures = _Figures(slowest, now, made, trained, more_workers, more_targets)
    return AdviceStatus(
        group=slowest, tokens_per_second=now, target_capacity=made, drafter_capacity=trained,
        with_another_worker=more_workers, with_another_target=more_targets,
        worker_place=place.gpu_uuid if isinstance(place, GpuGrant) else "",
        text=_text(name, figures, place),
    )  # fmt: skip


@dataclass(frozen=True)
class _Figures:
    group: str
    now: float
    made: float
    trained: float
    more_workers: float
    more_targets: float


def _sum(rates: Sequence[Rate]) -> float:
    return sum(rate.capacity for rate in rates)


def _text(name: BottleneckName, figures: _Figures, place: GpuGrant | GpuRefusal | None) -> str:
    if name == "transport":
        return (
            "both sides wait while rows are between them: another worker or target gives nothing; "
            "look at ring.num_slots, ring.capacity and the transport"
        )
    now = figures.now
    if figures.more_workers > now * _GAIN:
        gain = (
            f"another worker in group {figures.group!r}: about {figures.more_workers:.0f} tokens/s, "
            f"which are {now:.0f}; the targets can make {figures.made:.0f}"
        )
        return f"{gain}. {_where(place)}"
    if figures.more_targets > now * _GAIN:
        return (
            f"another worker gives nothing: workers wait for rows. Another target server "
            f"(target.replicas): about {figures.more_targets:.0f} tokens/s, which are {now:.0f}; the "
            f"workers can train {figures.trained:.0f}"
        )
    return "neither another worker nor another target gives much: the sides are even; add both"


def _where(place: GpuGrant | GpuRefusal | None) -> str:
    if isinstance(place, GpuRefusal):
        return f"No GPU has a place for it: {place.reason}"
    if isinstance(place, GpuGrant):
        return f"It would go to {place.gpu_uuid}"
    return "It needs cores of its own"
