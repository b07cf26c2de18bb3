"""How long does one drafter step take, and where does the time go? Needs a CUDA GPU.

    python -m benchmarks.drafter_step --shape qwen3-8b|qwen3-4b|smollm2 [--window W] [--anchors A]
        [--precision bf16|fp8] [--vs specforge|specforge_liger] [--kernels] [--json]

Weights, features and tokens are random: the cost does not depend on them. A row holds four documents
whose first fifth is unsupervised. `floor_ms` is the multiply-adds of the projections, `fc` and the
head's two products at the rate that a large bfloat16 product reaches in this run. `attention_ms` is the attention kernels of all layers, forward and backward, and
`head_ms` the loss with the head's products, each run alone. `graphs` counts compiled graphs. With `--vs` the
peer's steps and these take turns, and `ratio` is the peer's time over this one's.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.drafters.dflash.anchors import select_anchors
from common.drafters.dflash.attention import make_layout
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterSpec, Precision
from common.drafters.dflash.float8_products import float8_products
from common.drafters.dflash.loss import head_loss
from common.drafters.dflash.model import DFlashDrafter, plain_products
from common.drafters.dflash.objective import DFlashObjective
from common.tensors import RowBuffers
from services.drafter_worker.compile import num_graphs, num_recompiles
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper

NUM_DOCUMENTS, NUM_ROWS, NUM_AUX = 4, 8, 5
BLOCK_SIZE, NUM_LAYERS = 16, 5
TURNS = 3


@dataclass(frozen=True)
class Shape:
    """A target's sizes, and the row it is trained at."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    target_layers: int
    row_tokens: int
    anchors: int


SHAPES = {
    "qwen3-8b": Shape(4096, 32, 8, 128, 12288, 151936, 36, 4096, 512),
    "qwen3-4b": Shape(2560, 32, 8, 128, 9728, 151936, 36, 2048, 256),
    "smollm2": Shape(576, 9, 3, 64, 1536, 49152, 30, 2048, 256),
}


def make_spec(shape: Shape, window: int) -> DrafterSpec:
    """Return the drafter's spec; with a window, every layer but the last slides."""
    kinds = [SLIDING_ATTENTION if window else FULL_ATTENTION] * (NUM_LAYERS - 1)
    return DrafterSpec(
        num_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40960,
        num_target_layers=shape.target_layers,
        target_layer_ids=tuple(range(1, 1 + 7 * NUM_AUX, 7)),
        mask_token_id=shape.vocab - 1,
        sliding_window=window,
        layer_types=(*kinds, FULL_ATTENTION),
        loss_decay_gamma=7.0,
    )


def floor_flops(shape: Shape, anchors: int) -> float:
    """Return the multiply-adds (times two) of a step's matrix products, without attention."""
    queries, keys = anchors * BLOCK_SIZE, shape.row_tokens + anchors * BLOCK_SIZE
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * queries * width + 2 * keys * kv_width)
    layer += 3 * queries * shape.hidden * shape.intermediate
    fuse = shape.row_tokens * NUM_AUX * shape.hidden * shape.hidden
    head = anchors * (BLOCK_SIZE - 1) * shape.hidden * shape.vocab
    return 2.0 * (3 * NUM_LAYERS * layer + 2 * fuse + 2 * head)


def product_rate() -> float:
    """Return the FLOP/s of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (median_ms(lambda: a @ b, 20) / 1e3)


def median_ms(function: Any, repeats: int) -> float:
    """Return the median GPU time of a call."""
    for _ in range(3):
        function()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def make_rows(shape: Shape, spec: DrafterSpec) -> list[RowBuffers]:
    """Return packed rows of four documents, cut at other places in each."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(NUM_ROWS):
        tokens = shape.row_tokens
        cuts = torch.randperm(tokens // 64 - 1, generator=generator)[: NUM_DOCUMENTS - 1] + 1
        bounds = [0, *sorted((64 * cuts).tolist()), tokens]
        document, position = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens)
        mask = torch.ones(tokens, dtype=torch.uint8)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            document[start:stop] = index
            position[start:stop] = torch.arange(stop - start)
            mask[start : start + (stop - start) // 5] = 0
        ids = torch.randint(0, shape.vocab - 1, (tokens,), generator=generator)
        features = torch.randn(tokens, NUM_AUX * spec.hidden_size, generator=generator)
        rows.append(
            RowBuffers(
                ids.to("cuda", torch.int32),
                document.cuda(),
                position.to("cuda", torch.int32),
                mask.cuda(),
                features.to("cuda", torch.bfloat16),
            )
        )
    return rows


def make_stepper(
    shape: Shape, spec: DrafterSpec, anchors: int, chunk_rows: int, precision: Precision = "bf16"
) -> Stepper:
    """Return the worker's own stepper on random weights, compiled and captured."""
    with torch.device("cuda"):
        drafter = DFlashDrafter(spec, float8_products if precision == "fp8" else plain_products)
        head = torch.randn(shape.vocab, shape.hidden, dtype=torch.bfloat16) * 0.02
        embedding = torch.randn(shape.vocab, shape.hidden, dtype=torch.bfloat16) * 0.02
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    masters = [p.detach().float().clone() for p in drafter.parameters()]
    drafter.to(torch.bfloat16)
    optimizer = MasterOptimizer(drafter.parameters(), masters, OptimizerTable())
    objective = DFlashObjective(
        drafter, embedding=embedding, head=head, num_anchors=anchors, max_documents=64,
        loss_chunk_rows=chunk_rows, backend="blocks", precision=precision,
    ).cuda()  # fmt: skip
    tokens, documents, positions = (
        torch.zeros(shape.row_tokens, dtype=torch.int32, device="cuda") for _ in range(3)
    )
    mask = torch.zeros(shape.row_tokens, dtype=torch.uint8, device="cuda")
    features = torch.zeros(
        shape.row_tokens, NUM_AUX * shape.hidden, dtype=torch.bfloat16, device="cuda"
    )
    buffers = RowBuffers(tokens, documents, positions, mask, features)
    return Stepper(objective, optimizer, buffers, use_compile=True, use_cuda_graphs=True)


def turns_with_peer(options: argparse.Namespace, step: Callable[[], None]) -> dict[str, float]:
    """Return medians of both sides' steps, measured in turns, and their ratio."""
    command = [
        sys.executable, "-m", "benchmarks.peers", options.vs, "--shape", options.shape,
        "--window", str(options.window), "--anchors", str(options.anchors),
    ]  # fmt: skip
    ours, peers = [], []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        warm = json.loads(peer.stdout.readline() or "{}")
        if not warm:
            raise SystemExit(
                f"{options.vs} did not start; see benchmarks/peers.py for its packages"
            )
        for _ in range(TURNS):
            print("steps", file=peer.stdin)
            peers.append(float(peer.stdout.readline()))
            ours.append(median_ms(step, options.steps // TURNS))
        peer.stdin.close()
    ms, peer_ms = statistics.median(ours), statistics.median(peers)
    return {
        "step_ms": ms, "peer_step_ms": peer_ms, "peer_peak_gib": warm["peak_gib"],
        "ratio": peer_ms / ms,
    }  # fmt: skip


def count_host_syncs(step: Callable[[], None]) -> int:
    """Return how often a step makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def attention_ms(stepper: Stepper, spec: DrafterSpec, shape: Shape) -> float:
    """Return the milliseconds of every layer's attention, forward and backward, on the loaded row."""
    objective, row = stepper.objective, stepper.row
    anchors, is_valid = select_anchors(
        row.loss_mask, row.document_ids, row.draw, objective.num_anchors, objective.max_documents
    )
    layout = make_layout(anchors, is_valid, row.position_ids, spec.block_size)
    num_rows = objective.num_anchors * spec.block_size
    sizes = [(shape.heads, num_rows)]
    sizes += [(shape.kv_heads, n) for n in (shape.row_tokens,) * 2 + (num_rows,) * 2]
    q, *keys_values = (
        torch.randn(
            rows, heads, shape.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
        ).transpose(0, 1)
        for heads, rows in sizes
    )
    slope = torch.randn_like(q)

    def run() -> None:
        for attend in objective.attends(layout):
            out = attend(q, (keys_values[0], keys_values[1]), (keys_values[2], keys_values[3]))
            torch.autograd.grad(out, [q, *keys_values], slope)

    return median_ms(run, 20)


def head_ms(stepper: Stepper) -> float:
    """Return the milliseconds of the loss and its hidden gradient."""
    objective = stepper.objective
    rows = objective.num_anchors * objective.drafter.spec.num_draft_tokens
    hidden = torch.randn(rows, objective.head.shape[1], device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(rows, dtype=torch.int64, device="cuda")
    is_used = torch.ones(rows, dtype=torch.bool, device="cuda")

    def run() -> None:
        head_loss(
            hidden, objective.head, labels, is_used, None, None, "cross_entropy",
            objective.loss_chunk_rows, objective.head_rows, objective.float8_head, 0.0,
        )  # fmt: skip

    return median_ms(run, 10)


def kernel_table(step: Any) -> list[tuple[str, float, int]]:
    """Return kernels with their milliseconds and calls a step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.self_device_time_total / 3e3, event.count // 3)
        for event in profiler.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one shape."""
    shape = SHAPES[options.shape]
    anchors = options.anchors or shape.anchors
    spec = make_spec(shape, options.window)
    torch.cuda.reset_peak_memory_stats()
    stepper = make_stepper(shape, spec, anchors, options.chunk_rows, options.precision)
    rows = make_rows(shape, spec)
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        stepper.load(rows[number % NUM_ROWS], (0, number, 0))
        stepper.micro()
        stepper.update(1e-5)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    against = turns_with_peer(options, step) if options.vs else {}
    ms = against.pop("step_ms", None) or median_ms(step, options.steps)
    change = torch.cuda.memory_allocated() - allocated
    peak = torch.cuda.max_memory_allocated()
    host_syncs = count_host_syncs(step)
    micro_ms = median_ms(stepper.micro, 10)
    load_ms = median_ms(lambda: stepper.load(rows[0], (0, 0, 0)), 10)
    sums, norm = stepper.take_sums()
    result = {
        "shape": options.shape,
        "device": torch.cuda.get_device_name(),
        "row_tokens": shape.row_tokens,
        "anchors": anchors,
        "window": options.window,
        "precision": options.precision,
        "step_ms": round(ms, 2),
        "load_ms": round(load_ms, 2),
        "micro_ms": round(micro_ms, 2),
        "tokens_per_second": round(shape.row_tokens / ms * 1e3),
        "floor_ms": round(floor_flops(shape, anchors) / product_rate() * 1e3, 2),
        "attention_ms": round(attention_ms(stepper, spec, shape), 2),
        "head_ms": round(head_ms(stepper), 2),
        "peak_gib": round(peak / 2**30, 2),
        "allocated_change_bytes": change,
        "recompiles": num_recompiles(),
        "graphs": num_graphs(),
        "host_syncs": host_syncs,
        "loss": round(sums[0] / sums[1], 4),
        "gradient_norm": round(norm, 5),
        **{name: round(value, 3) for name, value in against.items()},
    }
    if options.kernels:
        table = kernel_table(step)
        print(f"{sum(ms for _, ms, _ in table):8.3f} ms {sum(c for _, _, c in table):4d} kernels")
        for name, kernel_ms, calls in table[:60]:
            print(f"{kernel_ms:8.3f} ms {calls:4d} x  {name[:110]}")
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--anchors", type=int, default=0)
    parser.add_argument("--chunk-rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--vs", choices=("specforge", "specforge_liger"))
    parser.add_argument("--kernels", action="store_true", help="print the kernel table")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
