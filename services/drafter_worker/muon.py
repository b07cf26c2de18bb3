"""Muon on float32 masters: a matrix moves along its momentum, made orthogonal.

    momentum <- mu momentum + (1 - mu) gradient
    update   <- orthogonal matrix near (1 - mu) gradient + mu momentum      Newton-Schulz, bfloat16
    master   <- (1 - rate decay) master - rate factor(shape) update

The same steps as `torch.optim.Muon`, whose learning rate is a number of the host: here it is a tensor,
so that a CUDA graph follows a schedule. Matrices of one shape are made orthogonal together.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from services.drafter_worker.config import MatrixRate, OptimizerTable
from services.drafter_worker.update import Change, Parameters

# The quintic of Keller Jordan's Muon, as in torch.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_NORM_EPSILON = 1e-7
# A product of this many elements fills a GPU; more at once would only take memory.
_BATCH_ELEMENTS = 1 << 26


class MuonRule:
    """Momentum of some matrices."""

    def __init__(self, parameters: Parameters, table: OptimizerTable) -> None:
        self.parameters = parameters
        self._table = table
        self._momentum = [torch.zeros_like(master) for master in parameters.masters]
        self._batches = list(batches_of([tuple(m.shape) for m in parameters.masters]))

    @property
    def moments(self) -> dict[str, list[Tensor]]:
        """What the rule keeps for each parameter, by name."""
        return {"momentum": self._momentum}

    def apply(self, gradients: list[Tensor], change: Change) -> None:
        """Change masters and working weights by one step."""
        if not change.is_bad.is_cuda and change.is_bad:
            return
        for batch in self._batches:
            self._apply_to(batch, [gradients[index] for index in batch], change)

    def _apply_to(self, batch: list[int], gradients: list[Tensor], change: Change) -> None:
        table, (masters, working) = self._table, self.parameters
        rows, columns = masters[batch[0]].shape
        updates = gradients[0].new_empty((len(batch), rows, columns), dtype=torch.bfloat16)
        for index, gradient, update in zip(batch, gradients, updates, strict=True):
            advance(self._momentum[index], gradient, update, change, table.momentum)
        updates = orthogonalise(updates)
        rate = change.learning_rate * table.matrix_rate_ratio
        kept = 1.0 - rate * table.weight_decay
        step = rate * rate_factor(table.matrix_rate, rows, columns)
        for index, update in zip(batch, updates, strict=True):
            move(masters[index], working[index], update, kept, step, change.is_bad)


def batches_of(shapes: list[tuple[int, ...]]) -> Iterator[list[int]]:
    """Yield the indexes of matrices of one shape, as many as are worth a product at once."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    for shape, indexes in by_shape.items():
        count = max(1, _BATCH_ELEMENTS // math.prod(shape))
        for start in range(0, len(indexes), count):
            yield indexes[start : start + count]


def rate_factor(matrix_rate: MatrixRate, rows: int, columns: int) -> float:
    """Return what the learning rate of a matrix is multiplied by, as torch.optim.Muon does."""
    if matrix_rate == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices [n, r, c] with their singular values brought near 1, in bfloat16.

    The polynomial acts on the smaller side.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / norm.clamp_min(_NORM_EPSILON)
    for _ in range(_ITERATIONS):
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        factors = (x, polynomial) if is_tall else (polynomial, x)
        x = torch.baddbmm(x, *factors, beta=_A)
    return x


def advance(momentum: Tensor, gradient: Tensor, update: Tensor, change: Change, mu: float) -> None:
    """Take a gradient [r, c] into the momentum; fill `update` with what is to be orthogonal."""
    if momentum.is_cuda:
        from services.drafter_worker.muon_kernels import advance_in_place

        advance_in_place(momentum, gradient, update, change.scale, change.is_bad, mu)
        return
    mean = gradient.float() * change.scale
    momentum.lerp_(mean, 1 - mu)
    update.copy_(mean.lerp(momentum, mu))


def move(
    master: Tensor, working: Tensor, update: Tensor, kept: Tensor, step: Tensor, is_bad: Tensor
) -> None:
    """Decay a master [r, c], move it along its orthogonal update, and round it."""
    if master.is_cuda:
        from services.drafter_worker.muon_kernels import move_in_place

        move_in_place(master, working, update, kept, step, is_bad)
        return
    master.mul_(kept).sub_(update.float() * step)
    working.copy_(master)
