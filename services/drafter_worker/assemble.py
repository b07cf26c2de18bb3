"""Opens what a worker holds open, in order, onto a stack that closes it in reverse."""

import contextlib
import threading
from collections.abc import Callable

import torch

from common.contracts.control_messages import Phase
from common.ring.consumer import RingConsumer
from common.ring.layout import SlotLayout
from common.telemetry.metrics import MetricsLog
from common.tensors import RowBuffers, pin, unpin
from services.drafter_worker.build import (
    build_stepper,
    build_trainee,
    check_schema,
    describe_run,
)
from services.drafter_worker.checkpoint import CheckpointStore
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.feed import RowFeed
from services.drafter_worker.meter import Meter
from services.drafter_worker.worker import DrafterWorker, Parts


def open_worker(
    config: WorkerConfig,
    index: int,
    instance: str,
    stop: threading.Event,
    stack: contextlib.ExitStack,
    enter: Callable[[Phase], None],
) -> DrafterWorker:
    """Load, connect, compile; `stack` closes feed, ring and metrics."""
    run, training = config.run, config.training
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    own = run.directory / "checkpoints" / training.group / str(index)
    store = CheckpointStore(own, training.keep_checkpoints)
    trainee = build_trainee(config, store)
    consumer = stack.enter_context(
        contextlib.closing(
            RingConsumer(
                endpoint=run.directory / "target-0.sock",
                worker_id=instance,
                group=training.group,
                capacity=config.ring.capacity,
                consumed=trainee.consumed,
            )
        )
    )
    enter("waiting")
    schema = check_schema(consumer, config, trainee)
    if run.device == "cuda" and consumer.memory is not None:
        pin(consumer.memory)
        stack.callback(unpin, consumer.memory)
    enter("compiling")
    stepper = build_stepper(config, trainee, schema)
    device = torch.device(run.device)
    dtype = next(trainee.drafter.parameters()).dtype
    buffers = [RowBuffers.allocate(schema, device, dtype) for _ in range(config.ring.capacity)]
    feed = stack.enter_context(
        contextlib.closing(
            RowFeed(
                consumer,
                SlotLayout(schema),
                buffers,
                target_timeout_seconds=training.target_timeout_seconds,
            )
        )
    )
    metrics = stack.enter_context(MetricsLog(run.directory / "metrics" / f"{instance}.jsonl"))
    meter = Meter(training.group, index, run.device, trainee.progress)
    parts = Parts(
        trainee=trainee,
        consumer=consumer,
        feed=feed,
        stepper=stepper,
        store=store,
        meter=meter,
        metrics=metrics,
        run=describe_run(config, trainee, schema),
        summary=run.directory / "workers" / f"{instance}.summary.json",
    )
    return DrafterWorker(config, parts, stop)
