"""The compiled, captured step against eager code on the same GPU."""

from dataclasses import replace

import pytest
import torch

from common.drafters.dflash.config import SLIDING_ATTENTION, DrafterSpec, Precision
from common.drafters.dflash.float8_products import float8_products
from common.drafters.dflash.model import DFlashDrafter, plain_products
from common.drafters.dflash.objective import DFlashObjective, StagedRow
from common.tensors import RowBuffers
from services.drafter_worker.compile import num_recompiles
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper
from tests.drafters import make_drafter, make_row, make_spec, make_tables

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
NUM_TOKENS, NUM_ANCHORS = 384, 64
LENGTHS = ((100, 150, 90), (384,), (40, 41, 42, 43), (300,))


def spec_for(kind: str) -> DrafterSpec:
    spec = make_spec(hidden_size=128, intermediate_size=256, head_dim=32, block_size=8)
    if kind == "full":
        return spec
    return replace(spec, layer_types=(SLIDING_ATTENTION, spec.layer_types[1]), sliding_window=20)


def make_objective(
    drafter: DFlashDrafter, backend: str, precision: Precision = "bf16"
) -> DFlashObjective:
    device, dtype = "cuda", next(drafter.parameters()).dtype
    embedding, head = (table.to(device, dtype) for table in make_tables(drafter.spec))
    return DFlashObjective(
        drafter, embedding=embedding, head=head, num_anchors=NUM_ANCHORS, max_documents=8,
        loss_chunk_rows=128, backend=backend, precision=precision,
    ).to(device)  # fmt: skip


def make_stepper(
    spec: DrafterSpec,
    dtype: torch.dtype,
    backend: str,
    fast: bool,
    precision: Precision = "bf16",
    *,
    captured: bool | None = None,  # as `fast` where it is not given
) -> Stepper:
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    drafter = make_drafter(spec, products=float8_products if precision == "fp8" else plain_products)
    masters = [p.detach().float().clone().cuda() for p in drafter.parameters()]
    drafter.to("cuda", dtype)
    optimizer = MasterOptimizer(drafter.parameters(), masters, OptimizerTable(learning_rate=1e-3))
    width = len(spec.target_layer_ids) * spec.hidden_size
    ids = [torch.zeros(NUM_TOKENS, dtype=torch.int32, device="cuda") for _ in range(3)]
    mask = torch.zeros(NUM_TOKENS, dtype=torch.uint8, device="cuda")
    features = torch.zeros(NUM_TOKENS, width, dtype=dtype, device="cuda")
    objective = make_objective(drafter, backend, precision)
    return Stepper(objective, optimizer, RowBuffers(*ids, mask, features),
                   use_compile=fast, use_cuda_graphs=fast if captured is None else captured)  # fmt: skip


def buffers_of(row: StagedRow, dtype: torch.dtype) -> RowBuffers:
    moved = [tensor.cuda() for tensor in row[:5]]
    moved[4] = moved[4].to(dtype)
    return RowBuffers(*moved)


def train(stepper: Stepper, spec: DrafterSpec, dtype: torch.dtype, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        row = make_row(spec, LENGTHS[step % len(LENGTHS)], NUM_TOKENS, seed=step)
        stepper.load(buffers_of(row, dtype), (1, step, 0))
        stepper.micro()
        stepper.update(1e-3)
        sums, _ = stepper.take_sums()
        losses.append(sums[0] / sums[1])
    return losses


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_captured_step_equals_eager_dense_step(kind: str) -> None:
    spec = spec_for(kind)
    eager = train(make_stepper(spec, torch.float32, "dense", fast=False), spec, torch.float32, 8)
    fast = train(make_stepper(spec, torch.float32, "blocks", fast=True), spec, torch.float32, 8)
    torch.testing.assert_close(fast, eager, rtol=2e-3, atol=2e-3)


def test_bfloat16_step_follows_the_float32_curve() -> None:
    spec = spec_for("full")
    wide = train(make_stepper(spec, torch.float32, "dense", fast=False), spec, torch.float32, 8)
    narrow = train(make_stepper(spec, torch.bfloat16, "blocks", fast=True), spec, torch.bfloat16, 8)
    torch.testing.assert_close(narrow, wide, rtol=5e-2, atol=5e-2)


def test_float8_step_follows_the_bfloat16_curve() -> None:
    spec = replace(spec_for("full"), vocab_size=112, mask_token_id=111)
    curves = [
        train(
            make_stepper(spec, torch.bfloat16, "blocks", True, precision), spec, torch.bfloat16, 60
        )
        for precision in ("bf16", "fp8")
    ]
    plain, narrow = (torch.tensor(curve) for curve in curves)
    assert not torch.equal(plain, narrow)
    assert (narrow[-20:].mean() - plain[-20:].mean()).abs() < 0.1 * plain[-20:].mean()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_1000_steps_change_no_memory_compile_nothing_and_never_make_the_host_wait() -> None:
    spec = spec_for("sliding")
    stepper = make_stepper(spec, torch.bfloat16, "blocks", fast=True)
    rows = [buffers_of(make_row(spec, lengths, NUM_TOKENS), torch.bfloat16) for lengths in LENGTHS]
    stepper.take_sums()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    for step in range(1000):
        stepper.load(rows[step % len(rows)], (1, step, 0))
        stepper.micro()
        stepper.update(1e-3)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert num_recompiles() == 0
    assert stepper.num_graph_replays == 2000
    sums, norm = stepper.take_sums()
    assert all(value == value for value in (*sums, norm)), "NaN in the sums"


def test_warm_up_leaves_the_weights_alone() -> None:
    spec = spec_for("full")
    expected = [p.detach().clone() for p in make_drafter(spec).parameters()]
    stepper = make_stepper(spec, torch.float32, "blocks", fast=True)
    for got, want in zip(stepper.optimizer.masters, expected, strict=True):
        assert torch.equal(got.cpu(), want)
