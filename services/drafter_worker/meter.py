"""What a worker says of itself: durations, figures, and the report made of them."""

import logging
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.contracts.control_messages import HeldOutFigures, WorkerReport
from common.drafters.dflash.metrics import StepFigures
from common.lifecycle import process_age_seconds
from services.drafter_worker.compile import cache_counts, num_recompiles
from services.drafter_worker.device_clock import DeviceClock

_log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where the worker stands; part of every checkpoint."""

    step: int = 0
    trained_rows: int = 0
    trained_tokens: int = 0


@dataclass
class Meter:
    """Written by the main thread, read by the link's; each field is replaced whole."""

    group: str
    index: int
    device: str
    progress: Progress
    gpu_uuid: str = ""
    figures: StepFigures | None = None
    learning_rate: float = 0.0
    gradient_norm: float | None = None
    num_members: int = 0
    checkpoint: str = ""
    graph_replays: int = 0
    dropped_blocks: int = 0
    held_out: tuple[HeldOutFigures, ...] = ()
    held_out_step: int = 0
    refused_messages: dict[str, int] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)
    compile_seconds: float = 0.0
    compile_wait_seconds: float = 0.0
    seconds_to_first_step: float | None = None
    first_tokens: int = 0
    train_seconds: float = 0.0
    _last_row_at: float | None = None

    def __post_init__(self) -> None:
        self.clock = DeviceClock(self.device)

    def start(self) -> None:
        """The first row may come: rates count from here."""
        self.started_at = time.monotonic()
        self.first_tokens = self.progress.trained_tokens

    def row_done(self) -> None:
        """A row has been trained on, or all of it is enqueued."""
        self._last_row_at = time.monotonic()
        self.train_seconds = self._last_row_at - self.started_at

    def step_done(self) -> None:
        """An optimizer step has been applied; the first one is waited for, and told."""
        if self.seconds_to_first_step is not None:
            return
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds_to_first_step = process_age_seconds()
        cache = cache_counts()
        _log.info(
            "first step %.1f s after the process began; %.1f s of it compiling (cache: %d hits, "
            "%d misses), %.1f s waiting for another worker to compile",
            self.seconds_to_first_step, self.compile_seconds, cache.hits, cache.misses,
            self.compile_wait_seconds,
        )  # fmt: skip

    @property
    def tokens_per_second(self) -> float:
        """Row tokens trained on a second, waits included."""
        trained = self.progress.trained_tokens - self.first_tokens
        return trained / self.train_seconds if self.train_seconds else 0.0

    def report(self) -> WorkerReport:
        """Return the worker's report."""
        progress, figures = self.progress, self.figures
        last, cache = self._last_row_at, cache_counts()
        return WorkerReport(
            group=self.group,
            index=self.index,
            device=self.device,
            gpu_uuid=self.gpu_uuid,
            step=progress.step,
            trained_rows=progress.trained_rows,
            trained_tokens=progress.trained_tokens,
            tokens_per_second=self.tokens_per_second,
            loss=figures.loss if figures else None,
            acceptance_rate_at=figures.acceptance_rate_at if figures else (),
            accepted_prefix_length=figures.accepted_prefix_length if figures else None,
            learning_rate=self.learning_rate,
            gradient_norm=self.gradient_norm,
            starved_seconds=self.clock.starved_seconds,
            sync_seconds=self.clock.sync_seconds,
            num_members=self.num_members,
            step_seconds=self.clock.step_seconds,
            last_step_age_seconds=time.monotonic() - last if last is not None else None,
            seconds_to_first_step=self.seconds_to_first_step,
            compile_seconds=self.compile_seconds,
            compile_wait_seconds=self.compile_wait_seconds,
            compile_cache_hits=cache.hits,
            compile_cache_misses=cache.misses,
            recompiles=num_recompiles(),
            graph_replays=self.graph_replays,
            dropped_blocks=self.dropped_blocks,
            held_out=self.held_out,
            held_out_step=self.held_out_step,
            memory_bytes=allocated_bytes(self.device),
            refused_messages=self.refused_messages,
            checkpoint=self.checkpoint,
        )


def allocated_bytes(device: str) -> int:
    """Return the bytes that tensors take on the GPU, or that the process has resident on a CPU."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return resident_pages * resource.getpagesize()
