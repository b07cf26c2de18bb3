"""How fast does a ring move rows, against a plain copy of the same size?

    python -m benchmarks.ring_throughput [--backing host|cuda_ipc] [--slot-mib 128] [--rows 128]
        [--rounds 3] [--json]

An owner process fills slots as the target server does (copies on a stream of their own, publish when
they are done), a worker process stages them as the drafter worker does (`RowFeed`). Three passes:
`write` (the reader releases without copying), `read` (the owner publishes without filling) and `both`
at once; the headline is `both`. The limits are plain copies of the same size in the same run:

    host, GPU   pinned copies to the host and to the GPU; for `both`, the two at once
    cuda_ipc    a copy inside the GPU's memory; both at once share its bandwidth, so half of it each
    host, CPU   one core's memcpy between as much memory as the ring and its two ends take; for
                `both`, two processes' memcpy at once

Limits are measured before and after every pass and `--rounds` repeats all of it; each figure is a
median, since a shared machine's memory is faster at one minute than at the next. Rates are wall-clock
and include every message. With cuda_ipc a copy of 128 MiB takes 65 us, less than the messages of a
row; the figures that begin with `copy` are the same copies on the GPU's clock, without messages.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ring_limits import CAPACITY, NUM_SLOTS, gpu_copy_rates, limits
from benchmarks.script import positive, tidy_shared_memory
from common.config.shared import GroupTable, RingTable
from common.contracts.rows import RowSchema
from common.ring.backings import BACKINGS
from common.ring.layout import SlotLayout
from common.ring.owner import RingOwner, WritableSlot
from common.ring.worker_rings import WorkerRings
from common.tensors import StagingBuffers, slot_tensor
from services.drafter_worker.feed import RowFeed
from services.target_server.announcer import Announcer

HIDDEN_SIZE, NUM_AUX_LAYERS = 4096, 5
ROW_BYTES_A_TOKEN = HIDDEN_SIZE * NUM_AUX_LAYERS * 2
WARM_UP = 8
MODES = ("write", "read", "both")


@dataclass(frozen=True)
class Row:
    """What the announcer needs of a packed row."""

    sequence: int
    used_tokens: int
    documents: tuple[()] = ()


@dataclass(frozen=True)
class Copies:
    """A copy into a slot that may be under way."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Return when the slot is filled."""
        if self.event is not None:
            self.event.synchronize()


def make_schema(slot_mib: int) -> RowSchema:
    """Return a schema whose rows take about `slot_mib` MiB."""
    row_tokens = max(128, slot_mib * (1 << 20) // ROW_BYTES_A_TOKEN // 128 * 128)
    return RowSchema(
        row_tokens=row_tokens,
        max_documents=64,
        hidden_size=HIDDEN_SIZE,
        target_layer_ids=tuple(range(NUM_AUX_LAYERS)),
        aux_dtype="bfloat16",
        has_last_hidden_states_normed=False,
        target_fingerprint="benchmark",
        template_fingerprint="benchmark",
        feature_engine="benchmark",
    )


class Writer:
    """Fills and publishes rows."""

    def __init__(self, owner: RingOwner, source: torch.Tensor, *, fills: bool) -> None:
        self._owner = owner
        self._source = source
        self._fills = fills
        self._stream = torch.cuda.Stream() if source.is_cuda else None

    def publish(self, announcer: Announcer, first: int, stop: int) -> None:
        """Publish rows `first` to `stop` - 1."""
        for sequence in range(first, stop):
            slot = self._owner.loan(60)
            if slot is None:
                raise SystemExit("the ring stayed full for a minute")
            announcer.submit(slot, Row(sequence, len(self._source)), self._fill(slot))  # type: ignore[arg-type]

    def _fill(self, slot: WritableSlot) -> Copies:
        if not self._fills:
            return Copies(None)
        features = slot_tensor(self._owner.layout, "aux_hidden_states", slot.memory)
        if self._stream is None:
            features.copy_(self._source)
            return Copies(None)
        with torch.cuda.stream(self._stream):
            features.copy_(self._source, non_blocking=True)
            return Copies(self._stream.record_event(torch.cuda.Event(blocking=False)))


def consume(endpoint: Path, gpu: int | None, *, copies: bool) -> None:
    """Take every row until the stream is drained."""
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    consumer = WorkerRings([endpoint], worker_id="reader", group="main", capacity=CAPACITY, gpu=gpu)
    schema = consumer.schema(60)
    if schema is None:
        sys.exit("no owner")
    (stage if copies else release_only)(consumer, SlotLayout(schema), device)
    consumer.close()


def stage(consumer: WorkerRings, layout: SlotLayout, device: torch.device) -> None:
    """Copy every row as a worker does."""
    buffers = [StagingBuffers(layout, device, torch.bfloat16) for _ in range(CAPACITY)]
    feed = RowFeed(consumer, buffers, check_targets=lambda: None)
    while not consumer.is_drained:
        row = feed.next_row(0.05)
        if row is not None:
            consumer.mark_consumed({row.sequence})
            feed.give_back(row)
        elif consumer.is_settled:
            consumer.mark_committed()
    feed.close()
    if feed.num_rejected:
        sys.exit(f"{feed.num_rejected} copies were rejected")


def release_only(consumer: WorkerRings, _layout: SlotLayout, _device: torch.device) -> None:
    """Give every row back at once, uncopied."""
    while not consumer.is_drained:
        lease = consumer.acquire(0.05)
        if lease is not None:
            lease.release()
            consumer.mark_consumed({lease.descriptor.sequence})
            consumer.return_buffer(lease.descriptor.sequence)
        elif consumer.is_settled:
            consumer.mark_committed()


def run_pass(
    mode: str,
    backing: str,
    schema: RowSchema,
    num_rows: int,
    device: torch.device,
    reader_gpu: int | None = None,
) -> float:
    """Return the pass's rate in bytes a second; the reader is on the writer's GPU or another one."""
    gpu = device.index if device.type == "cuda" else None
    source = torch.randn(schema.row_tokens, HIDDEN_SIZE * NUM_AUX_LAYERS, device=device)
    source = source.to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as directory, RingOwner(
        endpoint=Path(directory) / "target-0.sock", run="bench", schema=schema,
        table=RingTable(num_slots=NUM_SLOTS, capacity=CAPACITY), groups={"main": GroupTable()},
        backing=BACKINGS[backing], gpu=gpu,
    ) as owner:  # fmt: skip
        writer = Writer(owner, source, fills=mode != "read")
        reads_on = gpu if reader_gpu is None else reader_gpu
        reader = start_reader(Path(directory) / "target-0.sock", reads_on, copies=mode != "write")
        with contextlib.ExitStack() as stack:
            stack.callback(reader.kill)
            announcer = stack.enter_context(Announcer())
            writer.publish(announcer, 0, WARM_UP)  # pages are faulted in, the reader has started
            wait_for_releases(owner, reader, WARM_UP)
            start = time.perf_counter()
            writer.publish(announcer, WARM_UP, WARM_UP + num_rows)
            wait_for_releases(owner, reader, WARM_UP + num_rows)
            seconds = time.perf_counter() - start
            owner.end(WARM_UP + num_rows - 1)
            reader.wait(60)
    return num_rows * source.nbytes / seconds


def start_reader(endpoint: Path, gpu: int | None, *, copies: bool) -> subprocess.Popen[bytes]:
    """Start the other process."""
    command = [sys.executable, "-m", "benchmarks.ring_throughput", "--consume", str(endpoint)]
    if gpu is not None:
        command += ["--gpu", str(gpu)]
    return subprocess.Popen([*command, *(["--copies"] if copies else [])])


def wait_for_releases(owner: RingOwner, reader: subprocess.Popen[bytes], num_rows: int) -> None:
    """Wait until the reader has released every row; a spin would take the ring's own core."""
    while owner.report().groups[0].released < num_rows:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(0.0005)
            raise SystemExit("the reader ended early")


def measure(backing: str, slot_mib: int, num_rows: int, rounds: int,
            device: torch.device) -> dict[str, Any]:  # fmt: skip
    """Return medians over `rounds` of rates, limits and ratios."""
    schema = make_schema(slot_mib)
    num_bytes = schema.row_tokens * ROW_BYTES_A_TOKEN
    samples: dict[str, list[float]] = defaultdict(list)
    before = limits(backing, num_bytes, device)
    for _ in range(rounds):
        for mode in MODES:
            rate = run_pass(mode, backing, schema, num_rows, device)
            after = limits(backing, num_bytes, device)
            add_samples(samples, mode, rate, (before[mode] + after[mode]) / 2)
            before = after
        if backing == "cuda_ipc":
            for mode, rate in gpu_copy_rates(num_bytes, device.index).items():
                add_samples(samples, f"copy_{mode}", rate, before[mode])
    return {
        "backing": backing,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **{name: round(statistics.median(values), 3) for name, values in samples.items()},
        "ratios": [round(ratio, 3) for ratio in samples["ratio"]],
        "slot_mib": round(num_bytes / (1 << 20), 1),
        "rows": num_rows,
    }


def add_samples(samples: dict[str, list[float]], name: str, rate: float, limit: float) -> None:
    """Add one pass to the samples; the pass `both` has the names without a prefix."""
    prefix = "" if name == "both" else f"{name}_"
    samples[f"{prefix}gbytes_per_second"].append(rate / 1e9)
    samples[f"{prefix}limit_gbytes_per_second"].append(limit / 1e9)
    samples[f"{prefix}ratio"].append(rate / limit)


def main() -> None:
    """Run the benchmark, or its reader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backing", choices=("host", "cuda_ipc"), default="host")
    parser.add_argument("--slot-mib", type=positive, default=128)
    parser.add_argument("--rows", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--consume", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--copies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.consume:
        consume(options.consume, options.gpu, copies=options.copies)
        return
    tidy_shared_memory()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if options.backing == "cuda_ipc" and device.type == "cpu":
        parser.error("--backing cuda_ipc needs a GPU")
    result = measure(options.backing, options.slot_mib, options.rows, options.rounds, device)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
