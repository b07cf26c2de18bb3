"""Chooses where slots live, and says why."""

import contextlib
from collections.abc import Iterator

from common.config.shared import RingTable, RunTable
from common.errors import ConfigError
from common.ring.owner import RingOwner
from common.ring.segment import SEGMENT_DIRECTORY
from common.tensors import pin, unpin


def choose_transport(run: RunTable, ring: RingTable) -> str:
    """Return the reason for the host ring, the one that this version has; refuse what it lacks."""
    if ring.transport == "cuda_ipc":
        raise ConfigError(
            "ring.transport = 'cuda_ipc' is not available in this version; set it to 'host' or 'auto'"
        )
    if not SEGMENT_DIRECTORY.is_dir():
        raise ConfigError(f"{SEGMENT_DIRECTORY} is missing; mount a tmpfs there")
    if ring.transport == "host":
        return "host: chosen in the config"
    if run.device == "cuda":
        return "host: pinned shared memory serves every GPU of the machine"
    return "host: there is no GPU in this run"


@contextlib.contextmanager
def pinned(ring: RingOwner) -> Iterator[None]:
    """Keep the ring's memory registered with CUDA, so that copies to it run at the link's rate."""
    pin(ring.memory)
    try:
        yield
    finally:
        unpin(ring.memory)
