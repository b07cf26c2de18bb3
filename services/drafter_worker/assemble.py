"""Opens what a worker holds open, in order, onto a stack that closes it in reverse."""

import contextlib
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from common.contracts.control_messages import Phase
from common.contracts.rows import RowSchema
from common.ring.endpoint import ring_endpoint
from common.ring.layout import SlotLayout
from common.ring.worker_rings import WorkerRings
from common.run_record import explain
from common.telemetry.metrics import MetricsLog
from common.telemetry.trackers import open_trackers
from common.tensors import StagingBuffers
from services.drafter_worker.build import (
    Trainee,
    build_objective,
    build_stepper,
    build_trainee,
    check_schema,
    compile_key,
    describe_agreement,
    describe_run,
    wait_for_schema,
)
from services.drafter_worker.checkpoint import CheckpointStore, refuse_other_series
from services.drafter_worker.compile_cache import CompileTurn
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.feed import RowFeed
from services.drafter_worker.group_worker import GroupWorker, Membership
from services.drafter_worker.held_out import open_held_out
from services.drafter_worker.meetings import Meetings
from services.drafter_worker.meter import Meter
from services.drafter_worker.step import Stepper
from services.drafter_worker.stream import TargetWatch
from services.drafter_worker.sync import Lineage
from services.drafter_worker.worker import DrafterWorker, Parts


class Enter(Protocol):
    """Is told what the worker does before it runs."""

    def __call__(self, phase: Phase, detail: str = "") -> None: ...


@dataclass(frozen=True)
class Place:
    """Who a worker is, and where it keeps compiled code."""

    index: int
    instance: str
    cache: Path | None
    """None: nothing is compiled."""
    gpu_uuid: str = ""
    """Its GPU; empty on the CPU."""


def open_worker(
    config: WorkerConfig,
    place: Place,
    stop: threading.Event,
    stack: contextlib.ExitStack,
    enter: Enter,
) -> DrafterWorker | None:
    """Load, connect, compile; `stack` closes what is open. None: nothing is to be trained."""
    run, training, instance = config.run, config.training, place.instance
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    store = open_store(config, place.index)
    trainee = build_trainee(config, store)
    rings = stack.enter_context(contextlib.closing(open_rings(config, instance, trainee)))
    watch = TargetWatch(run.directory, rings, training.target_timeout_seconds)
    enter("waiting")
    schema = wait_for_schema(rings, watch, stop)
    if schema is None:
        return None
    check_schema(schema, config, trainee)
    enter("compiling")
    meter = Meter(
        training.group, place.index, run.device, trainee.progress, gpu_uuid=place.gpu_uuid
    )
    stepper = compile_in_turn(
        config, trainee, schema, place=place, meter=meter, stop=stop, enter=enter
    )
    if stepper is None:
        return None
    feed = stack.enter_context(
        contextlib.closing(open_feed(config, rings, watch, schema, trainee.working_dtype))
    )
    explain(run.directory, run.name)
    origin = describe_run(config, trainee, schema)
    parts = Parts(
        trainee=trainee,
        rings=rings,
        feed=feed,
        stepper=stepper,
        store=store,
        meter=meter,
        metrics=stack.enter_context(open_metrics(config, instance, origin)),
        open_held_out=partial(
            open_held_out, run.directory, schema, stepper.objective, trainee.working_dtype
        ),
        run=origin,
        summary=run.directory / "workers" / f"{instance}.summary.json",
    )
    if not config.groups[training.group].is_synced:
        return DrafterWorker(config, parts, stop)
    membership = join_group(config, place.index, parts, schema)
    stack.enter_context(membership.meetings)
    return GroupWorker(config, parts, stop, membership)


def open_store(config: WorkerConfig, index: int) -> CheckpointStore:
    """Open a worker's series of checkpoints: a synced group has one, that of index 0."""
    group = config.training.group
    is_synced = config.groups[group].is_synced
    own = config.run.directory / "checkpoints" / group / str(0 if is_synced else index)
    if is_synced:
        refuse_other_series(own)
    return CheckpointStore(own, config.training.keep_checkpoints, is_shared=is_synced)


def open_rings(config: WorkerConfig, instance: str, trainee: Trainee) -> WorkerRings:
    """Connect to every target's ring, with the rows that the weights contain."""
    run = config.run
    return WorkerRings(
        [ring_endpoint(run, config.ring, i) for i in range(config.target.replicas)],
        worker_id=instance,
        group=config.training.group,
        capacity=config.ring.capacity,
        consumed=trainee.consumed,
        gpu=torch.cuda.current_device() if run.device == "cuda" else None,
    )


def open_metrics(config: WorkerConfig, instance: str, origin: dict[str, Any]) -> MetricsLog:
    """Open a worker's curves, here and in the trackers that the config names."""
    directory = config.run.directory
    trackers = open_trackers(config.training.trackers, directory, instance, origin)
    return MetricsLog(directory / "metrics" / f"{instance}.jsonl", trackers)


def join_group(config: WorkerConfig, index: int, parts: Parts, schema: RowSchema) -> Membership:
    """Make a worker a member; the counts of its checkpoint are the group's, not its own."""
    name, progress = config.training.group, parts.trainee.progress
    agreement = describe_agreement(config, parts.trainee, schema)
    lineage = Lineage.of_checkpoint(
        progress.step, progress.trained_rows, progress.trained_tokens, parts.trainee.consumed,
        is_saved=parts.store.newest() is not None,
    )  # fmt: skip
    progress.trained_rows = progress.trained_tokens = 0
    meetings = Meetings(
        config.run.directory, name, index, config.groups[name], agreement,
        device=parts.trainee.optimizer.masters[0].device,
    )  # fmt: skip
    return Membership(meetings, agreement, lineage)


def compile_in_turn(
    config: WorkerConfig,
    trainee: Trainee,
    schema: RowSchema,
    *,
    place: Place,
    meter: Meter,
    stop: threading.Event,
    enter: Enter,
) -> Stepper | None:
    """Build the stepper, where it compiles after a worker that compiles the same; None when stopped."""
    objective = build_objective(config, trainee, schema)
    build = partial(build_stepper, config, trainee, schema, objective)
    if place.cache is None:
        return build()
    turn = CompileTurn(
        place.cache, compile_key(config, trainee, schema), f"worker {place.instance}"
    )
    stepper = turn.take(build, stop, partial(enter, "compiling"))
    meter.compile_seconds, meter.compile_wait_seconds = turn.compile_seconds, turn.waited_seconds
    return stepper


def open_feed(
    config: WorkerConfig,
    rings: WorkerRings,
    watch: TargetWatch,
    schema: RowSchema,
    dtype: torch.dtype,
) -> RowFeed:
    """Allocate staging buffers and begin to fill them."""
    device = torch.device(config.run.device)
    layout = SlotLayout(schema)
    return RowFeed(
        rings,
        [StagingBuffers(layout, device, dtype) for _ in range(rings.num_buffers)],
        check_targets=watch.check,
    )
