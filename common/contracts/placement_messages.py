"""GPU leases, which ride in heartbeats and their replies: what a process asks for, holds and is told.

A claim is absolute and in every heartbeat, so that a control plane that starts again knows every
lease after one interval, and a lost message costs one.
"""

from typing import Annotated

from pydantic import Field

from common.contracts.record import Record
from common.contracts.ring_messages import Count

Uuid = Annotated[str, Field(min_length=1, max_length=128)]


class Gpu(Record):
    """One place: a GPU, or a MIG device of one, as NVML described it to the process that claims."""

    uuid: Uuid
    name: str
    index: Count
    """Of the GPU, in order of PCI addresses, as nvidia-smi counts."""
    total_bytes: Count
    free_bytes: Count
    parent: str = ""
    """Of a MIG device the UUID of its GPU."""
    is_in_parts: bool = False
    """The GPU is in MIG mode: its MIG devices are places, it is none."""


class GpuClaim(Record):
    """A process's wish for a place, and then its hold on one."""

    gpus: tuple[Gpu, ...]
    """All that the process sees, by its CUDA_VISIBLE_DEVICES."""
    num_bytes: Count
    """What it will take, by estimate."""
    held: str = ""
    """UUID of its place; empty while it asks for one."""
    locked: tuple[Uuid, ...] = ()
    """Places whose locks it found taken when it last tried."""


class GpuGrant(Record):
    """The place to take."""

    gpu_uuid: Uuid


class GpuRefusal(Record):
    """No place at this moment: which GPUs, why each is none, what to change."""

    reason: str
