"""Sums over the GPUs of a meeting, by NCCL, where each member has a GPU of its own.

NCCL waits for a peer on the GPU and without end. Here the host's clock ends it: what is not there in
time is aborted, and the meeting fails like any other. A process of two members on one GPU cannot be:
NCCL refuses it, so those sum in host memory.
"""

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.config.environment import set_where_unset

_POLL_SECONDS = 0.0005
_NEVER = timedelta(days=365)
_UUID_BYTES = 16


def identity_of(device: torch.device) -> Tensor:
    """Return the GPU's UUID as uint8 [16]; zeros for a device whose sums NCCL cannot make."""
    identity = torch.zeros(_UUID_BYTES, dtype=torch.uint8)
    if device.type != "cuda" or not dist.is_nccl_available():
        return identity
    properties: Any = torch.cuda.get_device_properties(device)
    if "MIG" in properties.name:  # NCCL takes one part of a GPU only
        return identity
    return torch.tensor(list(properties.uuid.bytes), dtype=torch.uint8)


def are_apart(identities: Tensor) -> bool:
    """Whether every member has a GPU of its own, by their identities uint8 [n, 16]."""
    known = {tuple(identity) for identity in identities.tolist()}
    return len(known) == len(identities) and (0,) * _UUID_BYTES not in known


class GpuSums:
    """NCCL between the members of one meeting. A failure is a RuntimeError, as Gloo's are."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
    ) -> None:
        """Connect: all members at once, within the timeout."""
        set_where_unset({
            # What is late or broken ends a meeting, not the process.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
            "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(timeout.total_seconds()))),
        })  # fmt: skip
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # noqa: SLF001
        self.device = device
        self._timeout = timeout
        self._never = threading.Event()
        self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        try:
            self.sum(torch.zeros(1, device=device))
        except RuntimeError:
            self.close()
            raise

    def sum(self, vector: Tensor) -> None:
        """Replace a float32 vector on the device by the sum over members: bit-equal at each."""
        work = self._group.allreduce([vector])
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():  # raises what has failed
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"a sum by NCCL took more than {self._timeout.total_seconds()} s"
                )
            self._never.wait(_POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """End what is under way and disconnect."""
        self._group.abort()
