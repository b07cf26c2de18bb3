"""The losses' kernels against plain torch in float64, and inside the captured step."""

from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.config import DrafterSpec, LossName
from common.drafters.dflash.loss import head_loss
from common.drafters.dflash.objective import DFlashObjective
from common.drafters.dflash.row_losses import against_target, cross_entropy
from common.tensors import RowBuffers
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper
from tests.drafters import make_drafter, make_row, make_spec, make_tables

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
KINDS = ("cross_entropy", "kl", "total_variation", "lk")
NUM_ROWS, NUM_TOKENS, WIDTH, ROW_TOKENS = 300, 120, 128, 384


def inputs(kind: str, vocab: int, scale: float = 0.2) -> dict[str, Tensor | None]:
    """Return the op's tensors on the CPU, bfloat16; a third of the rows are not used."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    needs_target = kind != "cross_entropy"
    target = normal(NUM_TOKENS, WIDTH) * scale
    tokens = torch.randint(0, NUM_TOKENS, (NUM_ROWS,), generator=generator)
    # Draft and target are alike, as in training: else what they share hangs on their smallest logits.
    hidden = target[tokens] + 0.3 * scale * normal(NUM_ROWS, WIDTH)
    return {
        "hidden": hidden.bfloat16(),
        "head": normal(vocab, WIDTH).bfloat16(),
        "labels": torch.randint(0, vocab, (NUM_ROWS,), generator=generator),
        "is_used": torch.rand(NUM_ROWS, generator=generator) > 0.33,
        "target_hidden": target.bfloat16() if needs_target else None,
        "target_tokens": tokens if needs_target else None,
    }


def on(
    given: dict[str, Tensor | None], device: str, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Return the tensors on a device, what is a number with a fraction in `dtype`."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if value is not None
        else None
        for name, value in given.items()
    }


def loss_kernels() -> ModuleType:
    """Return the kernels, which import triton."""
    from common.drafters.dflash import loss_kernels as kernels

    return kernels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [61, 2048, 49152])
def test_op_gives_what_it_gives_on_the_cpu(kind: str, vocab: int) -> None:
    given = on(inputs(kind, vocab), "cpu", torch.float32)
    losses, is_correct, gradient = head_loss(
        **given, kind=kind, chunk_rows=64, head_rows=1 << 20, float8_head=[], target_softcap=0.0
    )
    got = head_loss(
        **on(given, "cuda", torch.float32),
        kind=kind,
        chunk_rows=128,
        head_rows=1 << 20,
        float8_head=[],
        target_softcap=0.0,
    )
    torch.testing.assert_close(got[0].cpu(), losses, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1].cpu(), is_correct)
    # The last bit of a logit decides the side of a token on which draft and target agree.
    tolerance = 1e-4 if kind in ("cross_entropy", "kl") else 1e-2
    assert (got[2].cpu() - gradient).norm() < tolerance * gradient.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [61, 2048, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_what_plain_torch_gives_of_the_same_logits(
    kind: str, vocab: int, dtype: torch.dtype
) -> None:
    given = on(inputs(kind, vocab), "cuda", dtype)
    labels, is_used = given["labels"], given["is_used"]
    logits = given["hidden"] @ given["head"].T
    slopes, losses, is_correct = logits.clone(), torch.empty(NUM_ROWS).cuda(), is_used.clone()
    if kind == "cross_entropy":
        found, expected = cross_entropy(logits, labels)
        loss_kernels().cross_entropy_in_place(slopes, labels, is_used, losses, is_correct)
    else:
        target_logits = given["target_hidden"][given["target_tokens"]] @ given["head"].T
        found, expected = against_target(logits, target_logits, kind)
        loss_kernels().against_target_in_place(
            slopes, target_logits, labels, is_used, losses, is_correct, kind
        )
    torch.testing.assert_close(losses, torch.where(is_used, found, 0.0), rtol=1e-5, atol=1e-5)
    assert torch.equal(is_correct, (logits.argmax(-1) == labels) & is_used)
    assert not slopes[~is_used].any()
    error = (slopes.float() - expected)[is_used].norm() / expected[is_used].norm()
    assert error < (1e-4 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_used_and_huge_logits_never_give_nan(kind: str) -> None:
    given = on(inputs(kind, 5000, scale=1e4), "cuda", torch.bfloat16)
    given["hidden"][~given["is_used"]] = float("nan")
    losses, is_correct, gradient = head_loss(
        **given, kind=kind, chunk_rows=128, head_rows=1 << 20, float8_head=[], target_softcap=0.0
    )
    unused = ~given["is_used"]
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()
    assert not losses[unused].any()
    assert not gradient[unused].any()
    assert not is_correct[unused].any()


def make_stepper(spec: DrafterSpec, loss: LossName, *, fast: bool) -> Stepper:
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    drafter = make_drafter(spec)
    masters = [p.detach().float().clone().cuda() for p in drafter.parameters()]
    drafter.to("cuda", torch.float32)
    optimizer = MasterOptimizer(drafter.parameters(), masters, OptimizerTable())
    embedding, head = (table.cuda() for table in make_tables(spec))
    objective = DFlashObjective(
        drafter, embedding=embedding, head=head * 0.1, num_anchors=64, max_documents=8,
        loss_chunk_rows=128, backend="blocks" if fast else "dense", loss=loss,
    ).cuda()  # fmt: skip
    buffers = buffers_of(spec, (), 0)
    return Stepper(objective, optimizer, buffers, use_compile=fast, use_cuda_graphs=fast)


def buffers_of(spec: DrafterSpec, lengths: tuple[int, ...], seed: int) -> RowBuffers:
    row = make_row(spec, lengths, ROW_TOKENS, seed=seed)
    moved = [tensor.cuda() for tensor in row[:5]]
    return RowBuffers(*moved, last_hidden_states_normed=row.last_hidden_states_normed.cuda())


def train(stepper: Stepper, spec: DrafterSpec) -> list[float]:
    losses = []
    for step in range(6):
        stepper.load(
            buffers_of(spec, ((100, 150, 90), (384,), (40, 41))[step % 3], step), (1, step, 0)
        )
        stepper.micro()
        stepper.update(1e-3)
        sums, _ = stepper.take_sums()
        losses.append(sums[0] / sums[1])
    return losses


@pytest.mark.parametrize("loss", get_args(LossName))
def test_captured_step_equals_the_eager_one(loss: LossName) -> None:
    spec = make_spec(hidden_size=128, intermediate_size=256, head_dim=32, block_size=8)
    eager = train(make_stepper(spec, loss, fast=False), spec)
    fast = train(make_stepper(spec, loss, fast=True), spec)
    torch.testing.assert_close(fast, eager, rtol=2e-3, atol=2e-3)
