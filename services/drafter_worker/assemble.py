"""Opens what a worker holds open, in order, onto a stack that closes it in reverse."""

import contextlib
import threading
from collections.abc import Callable

import torch

from common.contracts.control_messages import Phase
from common.contracts.rows import RowSchema
from common.ring.endpoint import ring_endpoint
from common.ring.layout import SlotLayout
from common.ring.worker_rings import WorkerRings
from common.telemetry.metrics import MetricsLog
from common.tensors import StagingBuffers
from services.drafter_worker.build import (
    build_stepper,
    build_trainee,
    check_schema,
    describe_run,
    wait_for_schema,
)
from services.drafter_worker.checkpoint import CheckpointStore
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.feed import RowFeed
from services.drafter_worker.meter import Meter
from services.drafter_worker.stream import TargetWatch
from services.drafter_worker.worker import DrafterWorker, Parts


def open_worker(
    config: WorkerConfig,
    index: int,
    instance: str,
    stop: threading.Event,
    stack: contextlib.ExitStack,
    enter: Callable[[Phase], None],
) -> DrafterWorker | None:
    """Load, connect, compile; `stack` closes what is open. None: nothing is to be trained."""
    run, training = config.run, config.training
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    own = run.directory / "checkpoints" / training.group / str(index)
    store = CheckpointStore(own, training.keep_checkpoints)
    trainee = build_trainee(config, store)
    rings = stack.enter_context(
        contextlib.closing(
            WorkerRings(
                [ring_endpoint(run, config.ring, i) for i in range(config.target.replicas)],
                worker_id=instance,
                group=training.group,
                capacity=config.ring.capacity,
                consumed=trainee.consumed,
                gpu=torch.cuda.current_device() if run.device == "cuda" else None,
            )
        )
    )
    watch = TargetWatch(run.directory, rings, training.target_timeout_seconds)
    enter("waiting")
    schema = wait_for_schema(rings, watch, stop)
    if schema is None:
        return None
    check_schema(schema, config, trainee)
    enter("compiling")
    stepper = build_stepper(config, trainee, schema)
    feed = stack.enter_context(
        contextlib.closing(open_feed(config, rings, watch, schema, trainee.working_dtype))
    )
    metrics = stack.enter_context(MetricsLog(run.directory / "metrics" / f"{instance}.jsonl"))
    meter = Meter(training.group, index, run.device, trainee.progress)
    parts = Parts(
        trainee=trainee,
        rings=rings,
        feed=feed,
        stepper=stepper,
        store=store,
        meter=meter,
        metrics=metrics,
        run=describe_run(config, trainee, schema),
        summary=run.directory / "workers" / f"{instance}.summary.json",
    )
    return DrafterWorker(config, parts, stop)


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
