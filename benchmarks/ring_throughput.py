"""How fast does a ring move rows, against a plain copy of the same size?

    python -m benchmarks.ring_throughput [--slot-mib 64] [--rows 64] [--json]

An owner process writes every byte of each slot, a consumer process copies every byte out, verifies
the header and releases, both at once, one thread each. The limit is one core's plain copy of the
same bytes between two buffers of its own, measured before in the same run. On two cores both sides
of the ring share the memory bus that the limit has to itself.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common.config.shared import GroupTable, RingTable
from common.contracts.rows import RowSchema
from common.ring.consumer import RingConsumer
from common.ring.layout import SlotLayout
from common.ring.owner import RingOwner
from common.tensors import RowBuffers, slot_tensor

HIDDEN_SIZE, NUM_AUX_LAYERS = 4096, 5
ROW_BYTES_A_TOKEN = HIDDEN_SIZE * NUM_AUX_LAYERS * 2


def make_schema(slot_mib: int) -> RowSchema:
    """Return a schema whose rows take about `slot_mib` MiB."""
    row_tokens = max(128, slot_mib * (1 << 20) // ROW_BYTES_A_TOKEN // 128 * 128)
    return RowSchema(
        row_tokens=row_tokens,
        max_documents=64,
        hidden_size=HIDDEN_SIZE,
        target_layer_ids=tuple(range(NUM_AUX_LAYERS)),
        aux_dtype="bfloat16",
        has_last_hidden_states=False,
        target_fingerprint="benchmark",
        template_fingerprint="benchmark",
        feature_engine="benchmark",
    )


def copy_rate(source: torch.Tensor, repeats: int) -> float:
    """Return bytes a second of a plain copy on this core."""
    destination = torch.empty_like(source)
    destination.copy_(source)
    start = time.perf_counter()
    for _ in range(repeats):
        destination.copy_(source)
    return repeats * source.nbytes / (time.perf_counter() - start)


def consume(endpoint: Path) -> None:
    """Copy every row out until the stream is drained."""
    consumer = RingConsumer(endpoint=endpoint, worker_id="reader", group="main", capacity=2)
    schema = consumer.schema(30)
    if schema is None:
        sys.exit("no owner")
    layout = SlotLayout(schema)
    buffers = RowBuffers.allocate(schema, torch.device("cpu"), torch.bfloat16)
    while not consumer.is_drained:
        lease = consumer.acquire(0.05)
        if lease is None:
            if consumer.is_settled:
                consumer.mark_committed()
            continue
        buffers.copy_from_slot(layout, lease.memory)
        if not lease.is_intact(memoryview(buffers.token_ids.numpy()).cast("B")):
            sys.exit(f"row {lease.descriptor.sequence} is torn")
        lease.release()
        consumer.mark_consumed({lease.descriptor.sequence})
        consumer.return_buffer()
    consumer.close()


def measure(slot_mib: int, num_rows: int) -> dict[str, object]:
    """Return the ring's rate and the limit in one run."""
    schema = make_schema(slot_mib)
    width = HIDDEN_SIZE * NUM_AUX_LAYERS
    source = torch.randn(schema.row_tokens, width).to(torch.bfloat16)
    limit = copy_rate(source, max(4, num_rows // 4))
    with tempfile.TemporaryDirectory() as directory:
        endpoint = Path(directory) / "target-0.sock"
        table = RingTable(num_slots=4, capacity=2)
        groups = {"main": GroupTable()}
        with RingOwner(
            endpoint=endpoint, run="bench", schema=schema, table=table, groups=groups
        ) as owner:
            reader = subprocess.Popen([sys.executable, "-m", __spec__.name, "--consume", endpoint])
            publish(owner, source, 0, 4)  # the first rows fault the pages in
            wait_for_releases(owner, reader, 4)  # and the reader has started
            start = time.perf_counter()
            publish(owner, source, 4, 4 + num_rows)
            owner.end(3 + num_rows)
            wait_for_releases(owner, reader, 4 + num_rows)
            seconds = time.perf_counter() - start
            reader.wait(60)
    rate = num_rows * source.nbytes / seconds
    return {
        "backing": "host",
        "slot_mib": round(source.nbytes / (1 << 20), 1),
        "rows": num_rows,
        "gbytes_per_second": round(rate / 1e9, 3),
        "limit_gbytes_per_second": round(limit / 1e9, 3),
        "ratio": round(rate / limit, 3),
    }


def wait_for_releases(owner: RingOwner, reader: subprocess.Popen, num_rows: int) -> None:
    """Wait until the reader has released every row; a spin would take the ring's own core."""
    while owner.report().groups[0].released < num_rows:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(0.002)
            raise SystemExit("the reader ended early")


def publish(owner: RingOwner, source: torch.Tensor, first: int, stop: int) -> None:
    """Write and publish rows `first` to `stop` - 1."""
    for sequence in range(first, stop):
        slot = owner.loan(60)
        if slot is None:
            raise SystemExit("the ring stayed full for a minute")
        with slot:
            slot_tensor(owner.layout, "aux_hidden_states", slot.memory).copy_(source)
            slot.publish(sequence=sequence, split="train", used_tokens=len(source), documents=())


def main() -> None:
    """Run the benchmark, or its consumer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slot-mib", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--consume", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.consume:
        consume(options.consume)
        return
    result = measure(options.slot_mib, options.rows)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
