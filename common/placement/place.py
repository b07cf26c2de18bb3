"""How a process comes to its GPU, before CUDA is touched.

visible GPUs --claim in heartbeats--> control plane --grant--> lock --> CUDA_VISIBLE_DEVICES
                    ^                      |             (taken meanwhile: ask again)
                    '------- refusal ------'
                    nobody answers: the same policy, by the locks alone

consumes    answers to the claim          produces    the claim, then the hold, in heartbeats
waits for   an answer, a place            unblocked   by its timeout, a stop
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.config.environment import show_only_gpu
from common.config.shared import PlacementTable
from common.contracts.control_messages import Phase
from common.contracts.placement_messages import Gpu, GpuClaim, GpuGrant, GpuRefusal
from common.errors import PlacementError
from common.lifecycle import FileLock
from common.placement.policy import PlacementPolicy
from common.placement.seats import Seats
from common.placement.sight import gpus_in_sight
from common.telemetry.control_link import ControlLink

# How long the control plane may leave a claim unanswered: it may be starting beside this process.
_ANSWER_SECONDS = 5.0
_AGAIN_SECONDS = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuPlace:
    """This process's GPU, the only one that CUDA shows it; its own until the process has ended.

    It is not given back before: memory on the GPU is free only then.
    """

    gpu: Gpu
    reason: str
    """Who chose it."""
    lock: FileLock


@dataclass(frozen=True)
class PlaceSeeker:
    """Finds a place for the process behind a link."""

    link: ControlLink
    run_directory: Path
    table: PlacementTable
    enter: Callable[[Phase, str], None]
    """Is told what it waits for."""
    stop: threading.Event
    waits_for_ever: bool = False

    def take(self, num_bytes: int) -> GpuPlace | None:
        """Take a place and have CUDA show nothing else; None where a stop came first.

        Raises:
            ConfigError: the process sees no GPU.
            PlacementError: none had room for `placement.wait_seconds`.
        """
        claim = GpuClaim(gpus=gpus_in_sight(), num_bytes=num_bytes)
        limit = math.inf if self.waits_for_ever else self.table.wait_seconds
        deadline = time.monotonic() + limit
        while not self.stop.is_set():
            found = self._try(claim)
            if self.stop.is_set():
                break
            if isinstance(found, GpuPlace):
                self.link.claim = claim.model_copy(update={"held": found.gpu.uuid})
                self.link.report_soon()
                show_only_gpu(found.gpu.uuid)
                _log.info("GPU %s (%s): %s", found.gpu.uuid, found.gpu.name, found.reason)
                return found
            if isinstance(found, GpuGrant):  # its lock is another's: ask for the next one
                locked = (*claim.locked, found.gpu_uuid)
                claim = claim.model_copy(update={"locked": locked})
                continue
            if time.monotonic() >= deadline:
                raise PlacementError(f"{found.reason} (waited {limit:g} s, placement.wait_seconds)")
            # Waiting is overdue at some time; for one that may wait for the whole run it never is.
            self.enter("paused" if self.waits_for_ever else "waiting", found.reason)
            self.stop.wait(_AGAIN_SECONDS)
            claim = GpuClaim(gpus=gpus_in_sight(), num_bytes=num_bytes)
        return None

    def _try(self, claim: GpuClaim) -> GpuPlace | GpuGrant | GpuRefusal:
        """Ask, or choose where nobody answers, and lock; a grant says whose lock was taken."""
        answer = self.link.ask_for_gpu(claim, _ANSWER_SECONDS, self.stop)
        if isinstance(answer, GpuRefusal):
            return answer
        who, reason = self.link.identity, "granted by the control plane"
        seats = Seats(self.run_directory, self.table)
        with seats.one_at_a_time(who.instance):
            if answer is None:
                reason = (
                    f"chosen by itself, since no control plane answered in {_ANSWER_SECONDS:g} s"
                )
                holders = seats.holders([gpu.uuid for gpu in claim.gpus])
                answer = PlacementPolicy(self.table).choose(who.service, claim, holders)
                if isinstance(answer, GpuRefusal):
                    return answer
            lock = seats.take(answer.gpu_uuid, who.service, who.instance)
        if lock is None:
            return answer
        gpu = next((gpu for gpu in claim.gpus if gpu.uuid == answer.gpu_uuid), None)
        if gpu is None:
            lock.release()
            return GpuRefusal(reason=f"{answer.gpu_uuid} was granted, which is none of its GPUs")
        return GpuPlace(gpu, reason, lock)
