"""Float32 masters under AdamW or Muon, with every decision on the device.

    micro-step   backward makes gradients of its own; with accumulation they are added in float32
    update       norm, clip, then each rule on its parameters: masters, moments, working weights

Gradients are sums over tokens; `update` divides by the sum of weights, so that accumulating over
one row or four is the same mean. A step without weight, or with a gradient that is not finite,
changes neither weights nor moments.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from services.drafter_worker.adamw import AdamWRule
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.muon import MuonRule
from services.drafter_worker.update import Change, Parameters, UpdateRule

# As in the field's reference recipes: keeps the clip coefficient finite.
_NORM_EPSILON = 1e-6


class MasterOptimizer:
    """Masters, moments, and the working weights that the network computes with."""

    def __init__(
        self,
        working: Iterable[nn.Parameter],
        masters: list[Tensor],
        table: OptimizerTable,
        accumulation: int = 1,
    ) -> None:
        """Take the network's parameters and their float32 values, in the same order."""
        self.working = list(working)
        device = self.working[0].device
        is_shared = self.working[0].dtype == torch.float32
        self.masters = [p.detach() for p in self.working] if is_shared else masters
        self._table = table
        self._rules = make_rules(self.masters, [p.detach() for p in self.working], table)
        self._sums = [torch.zeros_like(m) for m in self.masters] if accumulation > 1 else None
        self._num_updates = torch.zeros((), device=device)
        self.learning_rate = torch.zeros((), device=device)
        self.gradient_norm = torch.zeros((), device=device)
        self.num_skipped = torch.zeros((), device=device)

    def backward(self, loss: Tensor) -> None:
        """Take up the gradients of a micro-step's loss sum."""
        # Without gradients to add to, backward hands over its own tensors.
        for parameter in self.working:
            parameter.grad = None
        loss.backward()
        if self._sums is not None:
            with torch.no_grad():
                torch._foreach_add_(self._sums, [_gradient(p) for p in self.working])

    @torch.no_grad()
    def update(self, weight_sum: Tensor) -> None:
        """Apply one step of the mean gradient.

        Args:
            weight_sum: 0-dim, what the summed gradients are divided by.
        """
        gradients = self._sums or [_gradient(p) for p in self.working]
        scale = torch.where(weight_sum > 0, 1.0 / weight_sum, torch.zeros_like(weight_sum))
        norm = global_norm(gradients) * scale
        clip = (self._table.max_gradient_norm / (norm + _NORM_EPSILON)).clamp_max(1.0)
        is_bad = (weight_sum <= 0) | ~torch.isfinite(norm)
        change = Change(self.learning_rate, scale * clip, is_bad, self._num_updates)
        for indexes, rule in self._rules:
            rule.apply([gradients[index] for index in indexes], change)
        self._num_updates += ~is_bad
        self.gradient_norm.copy_(norm)
        self.num_skipped += is_bad
        if self._sums is not None:
            torch._foreach_zero_(self._sums)

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by name, for a checkpoint."""
        tensors = {"num_updates": self._num_updates}
        for indexes, rule in self._rules:
            for name, parts in {"master": rule.parameters.masters, **rule.moments}.items():
                tensors |= {f"{i}.{name}": part for i, part in zip(indexes, parts, strict=True)}
        return tensors

    def masters_of(self, state: dict[str, Tensor]) -> list[Tensor]:
        """Return the masters in what `state` has returned, in their order."""
        return [state[f"{index}.master"] for index in range(len(self.masters))]

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore masters and moments, and the working weights from the masters.

        Raise `CheckpointError` for the state of another kind of optimizer.
        """
        own = self.state()
        if own.keys() != tensors.keys():
            unlike = sorted(own.keys() ^ tensors.keys())
            raise CheckpointError(
                f"trainer state is of another optimizer: got it and optimizer.kind "
                f"{self._table.kind!r} unlike in {', '.join(unlike[:3])}; set the old optimizer.kind"
            )
        for name, tensor in own.items():
            if tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"trainer state: {name} got {tuple(tensors[name].shape)}, expected "
                    f"{tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.round_to_working()

    @torch.no_grad()
    def round_to_working(self) -> None:
        """Bring the masters' values into the working weights."""
        for working, master in zip(self.working, self.masters, strict=True):
            working.copy_(master)

    def forget(self) -> None:
        """Drop the gradients since the last step."""
        if self._sums is not None:
            torch._foreach_zero_(self._sums)

    @property
    def gradient_sums(self) -> list[Tensor]:
        """The float32 sums of gradients since the last step, which accumulation keeps."""
        assert self._sums is not None
        return self._sums


def make_rules(
    masters: list[Tensor], working: list[Tensor], table: OptimizerTable
) -> list[tuple[list[int], UpdateRule]]:
    """Return each rule with the indexes of its parameters: Muon's are the matrices."""

    def chosen(indexes: list[int]) -> Parameters:
        return Parameters([masters[i] for i in indexes], [working[i] for i in indexes])

    everything = range(len(masters))
    matrices = [i for i in everything if table.kind == "muon" and masters[i].ndim == 2]
    others = [i for i in everything if i not in matrices]
    rules: list[tuple[list[int], UpdateRule]] = []
    if matrices:
        rules.append((matrices, MuonRule(chosen(matrices), table)))
    if others:
        rules.append((others, AdamWRule(chosen(others), table)))
    return rules


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm [] of all gradients together, summed in float32."""
    if gradients[0].is_cuda:
        from services.drafter_worker.gradient_kernels import square_sum

        return square_sum(gradients).sqrt()
    # The public get_total_norm rounds each tensor's norm to the tensor's own type.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # noqa: SLF001
    return torch.linalg.vector_norm(torch.stack(norms))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; backward reaches every one."""
    assert parameter.grad is not None
    return parameter.grad
