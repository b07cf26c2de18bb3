"""AdamW on float32 masters, with every decision on the device.

    micro-step   backward makes gradients of its own; with accumulation they are added in float32
    update       norm, clip, AdamW and the working weights in one pass over memory

Gradients are sums over tokens; `update` divides by the sum of weights, so that accumulating over
one row or four is the same mean. A step without weight, or with a gradient that is not finite,
changes neither weights nor moments.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from services.drafter_worker.config import OptimizerTable

# As in the field's reference recipes: keeps the clip coefficient finite.
_NORM_EPSILON = 1e-6


class MasterAdamW:
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
        self._first = [torch.zeros_like(master) for master in self.masters]
        self._second = [torch.zeros_like(master) for master in self.masters]
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
        # The public get_total_norm rounds each tensor's norm to the tensor's own type.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # noqa: SLF001
        norm = torch.linalg.vector_norm(torch.stack(norms)) * scale
        clip = (self._table.max_gradient_norm / (norm + _NORM_EPSILON)).clamp_max(1.0)
        is_bad = (weight_sum <= 0) | ~torch.isfinite(norm)
        if norm.is_cuda:
            self._update_on_gpu(gradients, scale * clip, is_bad)
        else:
            self._update_on_cpu(gradients, scale * clip, is_bad)
        self._num_updates += ~is_bad
        self.gradient_norm.copy_(norm)
        self.num_skipped += is_bad
        if self._sums is not None:
            torch._foreach_zero_(self._sums)

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by name, for a checkpoint."""
        tensors = {"num_updates": self._num_updates}
        for index, parts in enumerate(zip(self.masters, self._first, self._second, strict=True)):
            for name, tensor in zip(("master", "exp_avg", "exp_avg_sq"), parts, strict=True):
                tensors[f"{index}.{name}"] = tensor
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore masters and moments, and the working weights from the masters."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        for working, master in zip(self.working, self.masters, strict=True):
            working.copy_(master)

    def _update_on_gpu(self, gradients: list[Tensor], scale: Tensor, is_bad: Tensor) -> None:
        from services.drafter_worker.adamw_kernels import adamw_in_place

        table, number = self._table, self._num_updates + 1
        scalars = torch.stack(
            [self.learning_rate, scale, 1 - table.beta1**number,
             (1 - table.beta2**number).sqrt(), (~is_bad).float()]
        )  # fmt: skip
        parts = (self.masters, self.working, gradients, self._first, self._second)
        for tensors in zip(*parts, strict=True):
            adamw_in_place(*tensors, scalars, table.beta1, table.beta2, table.epsilon,
                           table.weight_decay)  # fmt: skip

    def _update_on_cpu(self, gradients: list[Tensor], scale: Tensor, is_bad: Tensor) -> None:
        table = self._table
        torch._foreach_mul_(gradients, scale)
        adamw(
            self.masters, gradients, self._first, self._second, [],
            [self._num_updates.clone() for _ in self.masters],
            fused=True, found_inf=is_bad.float(), amsgrad=False, beta1=table.beta1,
            beta2=table.beta2, lr=self.learning_rate, weight_decay=table.weight_decay,
            eps=table.epsilon, maximize=False,
        )  # fmt: skip
        if self.working[0].dtype != torch.float32:
            torch._foreach_copy_([p.detach() for p in self.working], self.masters)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; backward reaches every one."""
    assert parameter.grad is not None
    return parameter.grad
