"""Optimizers on the GPU against the CPU's, step for step, and in a CUDA graph that follows a schedule."""

import pytest
import torch
from torch import Tensor, nn

from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.optim import MasterOptimizer, global_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = ((64, 96), (64, 96), (96, 64), (64, 64), (64,), (96,))
WEIGHT_SUM = 3.0


class Weights(nn.Module):
    """Parameters whose loss is given by their gradients."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.masters = [value.to(device) for value in values]
        self.weights = nn.ParameterList(value.to(device, dtype) for value in values)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in SHAPES]


def loss_of(weights: Weights, given: list[Tensor]) -> Tensor:
    pairs = zip(weights.weights, given, strict=True)
    return torch.stack([(w * g.to(w.device, w.dtype)).sum() for w, g in pairs]).sum()


def make(kind: str, device: str, dtype: torch.dtype, accumulation: int) -> tuple:
    weights = Weights(device, dtype)
    table = OptimizerTable(kind=kind, weight_decay=0.1)
    parameters = weights.weights.parameters()
    return weights, MasterOptimizer(parameters, weights.masters, table, accumulation)


def moved_alike(got: list[Tensor], wanted: list[Tensor], before: list[Tensor], muon: bool) -> None:
    for one, other, old in zip(got, wanted, before, strict=True):
        tolerance = 0.03 if muon and one.ndim == 2 else 1e-4
        assert (one.cpu() - other).norm() < tolerance * (other - old).norm()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_step_is_the_cpu_s(kind: str, dtype: torch.dtype, accumulation: int) -> None:
    weights, optimizer = make(kind, "cuda", dtype, accumulation)
    plain, reference = make(kind, "cpu", torch.float32, 1)
    for step in range(5):
        reference.load_state({name: value.cpu() for name, value in optimizer.state().items()})
        before = [master.clone() for master in reference.masters]
        given = gradients(step)
        for one, net in ((optimizer, weights), (reference, plain)):
            one.learning_rate.fill_(0.02 / (step + 1))
            one.backward(loss_of(net, given))
            one.update(torch.tensor(WEIGHT_SUM, device=one.learning_rate.device))
        moved_alike(optimizer.masters, reference.masters, before, kind == "muon")
        for working, master in zip(weights.weights, optimizer.masters, strict=True):
            assert torch.equal(working, master.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_the_same_each_time_and_that_of_float64(dtype: torch.dtype) -> None:
    sizes = ((3,), (40_000,), (300, 1000), (1,), (4096, 32))
    given = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
    wanted = torch.stack([one.double().square().sum() for one in given]).sum().sqrt()
    got = [global_norm(given) for _ in range(3)]
    torch.testing.assert_close(got[0].double(), wanted, rtol=1e-6, atol=0)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    given[2][7, 5] = float("inf")
    assert not torch.isfinite(global_norm(given))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_captured_update_follows_a_schedule_and_leaves_bad_steps_alone(kind: str) -> None:
    _, optimizer = make(kind, "cuda", torch.bfloat16, 4)
    _, reference = make(kind, "cuda", torch.bfloat16, 4)
    weight_sum = torch.zeros((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.update(weight_sum)  # no weight: nothing changes
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.update(weight_sum)
    weight_sum.fill_(WEIGHT_SUM)
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, rate in enumerate((0.02, 0.01, 0.0, 0.005)):
            is_bad = step == 3
            for one in (optimizer, reference):
                one.learning_rate.fill_(rate)
                one._sums[0].add_(float(step + 1))
                one._sums[4].add_(float("nan") if is_bad else 2.0)
                if one is optimizer:
                    graph.replay()
                else:
                    one.update(weight_sum)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
    for one, other in zip(optimizer.masters, reference.masters, strict=True):
        # A product under capture may be cut otherwise than outside.
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
        assert torch.isfinite(one).all()
    assert optimizer.num_skipped.item() == 2.0
    assert reference.num_skipped.item() == 1.0
