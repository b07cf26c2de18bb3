"""Optimizers against torch's own, their clip, accumulation and state; the learning rate's schedules."""

import pytest
import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.muon import batches_of, orthogonalise
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.schedule import Schedule

KINDS = ("adamw", "muon")
BATCH = 6


class Net(nn.Module):
    """Matrices of two shapes, one of them twice, tall, wide and square, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = nn.Linear(12, 5, bias=False), nn.Linear(5, 12, bias=False)
        self.first, self.second = (nn.Linear(12, 12, bias=False) for _ in range(2))
        self.scale, self.shift = nn.Parameter(torch.ones(12)), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.scale + self.shift)
        return self.tall(torch.tanh(self.wide(torch.tanh(self.second(x)))))


def make_optimizer(
    accumulation: int = 1, rate: float = 0.02, dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[Net, MasterOptimizer]:
    torch.manual_seed(0)
    net = Net()
    masters = [p.detach().clone() for p in net.parameters()]
    net.to(dtype)
    table = OptimizerTable(**changes)
    optimizer = MasterOptimizer(net.parameters(), masters, table, accumulation)
    optimizer.learning_rate.fill_(rate)
    return net, optimizer


def losses_at(net: nn.Module, step: int) -> Tensor:
    """Return the loss of each row of a batch that differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, 12, generator=generator) for _ in range(2))
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype)) - y).pow(2).sum(-1)


def run(net: Net, optimizer: MasterOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.backward(losses_at(net, step).sum())
        optimizer.update(torch.tensor(float(BATCH)))


def torchs_own(net: Net, table: OptimizerTable) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    is_muon = table.kind == "muon"
    others = [p for p in parameters if not is_muon or p.ndim != 2]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, weight_decay=table.weight_decay)
    ]
    if is_muon:
        adjust = None if table.matrix_rate == "original" else table.matrix_rate
        found.append(
            torch.optim.Muon(
                [p for p in parameters if p.ndim == 2],
                weight_decay=table.weight_decay,
                momentum=table.momentum,
                adjust_lr_fn=adjust,
            )
        )
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "adamw"},
        {"kind": "muon"},
        {"kind": "muon", "matrix_rate": "original"},
        {"kind": "muon", "matrix_rate_ratio": 3.0, "momentum": 0.8},
    ],
)
def test_each_step_is_torchs_own_on_the_mean_gradient(changes: dict) -> None:
    net, optimizer = make_optimizer(max_gradient_norm=1e9, weight_decay=0.1, **changes)
    table = OptimizerTable(weight_decay=0.1, **changes)
    reference = Net()
    expected = torchs_own(reference, table)
    for step in range(6):
        rate = 0.02 / (step + 1)
        reference.load_state_dict(net.state_dict())  # steps, not drifts, are compared
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.learning_rate.fill_(rate)
        run(net, optimizer, range(step, step + 1))
        reference.zero_grad()
        losses_at(reference, step).mean().backward()
        for one in expected:
            ratio = table.matrix_rate_ratio if isinstance(one, torch.optim.Muon) else 1.0
            one.param_groups[0]["lr"] = rate * ratio
            one.step()
        for p, q, old in zip(net.parameters(), reference.parameters(), before, strict=True):
            moved, wanted = p.detach() - old, q.detach() - old
            # Products in bfloat16 of a batch and of one matrix may round otherwise.
            tolerance = 0.02 if table.kind == "muon" and p.ndim == 2 else 1e-4
            assert (moved - wanted).norm() < tolerance * wanted.norm()


def test_muon_makes_matrices_orthogonal_and_keeps_their_directions() -> None:
    torch.manual_seed(0)
    for shape in ((3, 8, 32), (2, 32, 8), (1, 16, 16)):
        left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
        values = torch.linspace(0.3, 1.0, min(shape[1:])).diag()
        found = orthogonalise((left @ values @ right).bfloat16()).float()
        singular = torch.linalg.svdvals(found)
        assert singular.min() > 0.5
        assert singular.max() < 1.3
        aligned = left.mT @ found @ right.mT  # diagonal, where no direction has turned
        assert (aligned - torch.diag_embed(aligned.diagonal(dim1=1, dim2=2))).abs().max() < 0.1


def test_matrices_are_batched_by_shape_and_large_ones_are_alone() -> None:
    shapes = [(4, 8), (8, 4), (4, 8), (8192, 8192), (8192, 8192), (8, 4)]
    assert list(batches_of(shapes)) == [[0, 2], [1, 5], [3], [4]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_clip_is_of_the_mean_gradient(kind: str) -> None:
    net, optimizer = make_optimizer(kind=kind, max_gradient_norm=1.0)
    optimizer.backward(losses_at(net, 0).sum())
    summed = torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()
    optimizer.update(torch.tensor(4.0))
    assert optimizer.gradient_norm.item() == pytest.approx(summed / 4.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_clip_bounds_what_enters_the_moments(kind: str) -> None:
    net, optimizer = make_optimizer(kind=kind, max_gradient_norm=0.01)
    run(net, optimizer, range(1))
    name, share = ("exp_avg", 0.1) if kind == "adamw" else ("momentum", 0.05)
    kept = [value for key, value in optimizer.state().items() if key.endswith(name)]
    norm = torch.stack([value.norm() for value in kept]).norm().item()
    assert norm == pytest.approx(share * 0.01, rel=0.05 if kind == "adamw" else 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("weight_sum", [0.0, 1.0])
def test_a_step_without_weight_or_with_nan_changes_nothing(
    kind: str, accumulation: int, weight_sum: float
) -> None:
    net, optimizer = make_optimizer(accumulation, kind=kind, weight_decay=0.1)
    run(net, optimizer, range(2))
    before = {name: value.clone() for name, value in optimizer.state().items()}
    weights = [p.detach().clone() for p in net.parameters()]
    optimizer.backward(losses_at(net, 2).sum() * (1.0 if weight_sum == 0 else float("nan")))
    optimizer.update(torch.tensor(weight_sum))
    for name, value in optimizer.state().items():
        assert torch.equal(value, before[name]), name
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), weights, strict=True))
    assert optimizer.num_skipped.item() == 1
    run(net, optimizer, range(3, 4))
    assert torch.isfinite(torch.cat([p.flatten() for p in net.parameters()])).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_straight_one_bit_for_bit(kind: str) -> None:
    net, optimizer = make_optimizer(kind=kind, weight_decay=0.1)
    run(net, optimizer, range(3))
    saved = {name: value.clone() for name, value in optimizer.state().items()}
    other_net, other = make_optimizer(kind=kind, weight_decay=0.1)
    other.load_state(saved)
    for one, two in ((net, optimizer), (other_net, other)):
        run(one, two, range(3, 7))
    for p, q in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(p, q)
    assert all(torch.equal(v, other.state()[name]) for name, v in optimizer.state().items())


def test_the_state_of_another_kind_is_refused_by_name() -> None:
    _, adamw = make_optimizer(kind="adamw")
    _, muon = make_optimizer(kind="muon")
    with pytest.raises(CheckpointError, match=r"'muon'.*exp_avg.*set the old optimizer\.kind"):
        muon.load_state(adamw.state())


@pytest.mark.parametrize("kind", KINDS)
def test_accumulating_over_four_micro_steps_gives_the_weights_of_one(kind: str) -> None:
    weights = torch.tensor([0.1, 3.0, 0.0, 1.5, 0.7, 2.0])
    parts = ([0], [1, 2, 3], [4], [5])  # uneven in rows and in weight
    whole_net, whole = make_optimizer(1, kind=kind)
    parts_net, accumulated = make_optimizer(4, kind=kind)
    start = [p.detach().clone() for p in whole_net.parameters()]
    for step in range(5):
        whole.backward((losses_at(whole_net, step) * weights).sum())
        whole.update(weights.sum())
        total = torch.zeros(())
        for rows in parts:
            accumulated.backward((losses_at(parts_net, step) * weights)[rows].sum())
            total += weights[rows].sum()
        accumulated.update(total)
        torch.testing.assert_close(whole.gradient_norm, accumulated.gradient_norm)
    for p, q, old in zip(whole_net.parameters(), parts_net.parameters(), start, strict=True):
        moved = (p - old).norm()
        assert moved > 0.01
        # Muon's products are in bfloat16, where the last bit of a sum can turn.
        assert (p - q).norm() < (0.02 if kind == "muon" else 1e-4) * moved


@pytest.mark.parametrize("kind", KINDS)
def test_working_weights_in_bfloat16_are_the_rounded_masters(kind: str) -> None:
    net, optimizer = make_optimizer(kind=kind, dtype=torch.bfloat16)
    run(net, optimizer, range(3))
    for working, master in zip(net.parameters(), optimizer.masters, strict=True):
        assert torch.equal(working, master.bfloat16())
        assert not torch.equal(working.float(), master)


def test_schedule_warms_up_then_falls_to_zero_by_steps_or_by_the_stream() -> None:
    table = OptimizerTable(learning_rate=1.0, schedule_steps=100, warmup_ratio=0.1)
    by_steps = Schedule(table, total_rows=None)
    assert by_steps.at(0, 0) == pytest.approx(0.1)
    assert by_steps.at(9, 0) == pytest.approx(1.0)
    assert by_steps.at(54, 0) == pytest.approx(0.5)
    assert by_steps.at(99, 0) == pytest.approx(0.0)
    by_stream = Schedule(table.model_copy(update={"schedule_steps": 0}), total_rows=100)
    assert by_stream.at(0, 55) == by_steps.at(54, 0)
    assert Schedule(OptimizerTable(learning_rate=1.0), None).at(7, 7) == 1.0


def test_wsd_is_stable_between_its_warm_up_and_its_decay() -> None:
    table = OptimizerTable(
        learning_rate=2.0, schedule_steps=100, schedule="wsd", warmup_ratio=0.1, decay_ratio=0.3
    )
    schedule = Schedule(table, total_rows=None)
    rates = [schedule.at(step, 0) for step in range(100)]
    assert rates[4] == pytest.approx(1.0)
    assert rates[9:70] == [2.0] * 61
    assert rates[84] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.0)
    assert rates[70:] == sorted(rates[70:], reverse=True)
    assert rates[70] < 2.0


def test_a_constant_schedule_warms_up_and_stays() -> None:
    table = OptimizerTable(
        learning_rate=1.0, schedule_steps=100, schedule="constant", warmup_ratio=0.1
    )
    rates = [Schedule(table, None).at(step, 0) for step in (4, 9, 50, 99)]
    assert rates == [pytest.approx(0.5), 1.0, 1.0, 1.0]


def test_a_warm_up_and_a_decay_longer_than_the_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_ratio 0\.5 and decay_ratio 0\.6"):
        OptimizerTable(schedule="wsd", warmup_ratio=0.5, decay_ratio=0.6)
