"""AdamW on float32 masters, with every decision on the device.

Gradients are sums over tokens; `update` divides by the sum of weights, so that accumulating over
one row or four is the same mean. A step without weight, or with a gradient that is not finite,
changes neither weights nor moments.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from services.drafter_worker.config import OptimizerTable

# As in the field's reference recipes: keeps the clip coefficient finite.
_NORM_EPSILON = 1e-6


class MasterAdamW:
    """Masters, moments, and the working weights that the network computes with."""

    def __init__(
        self, working: Iterable[nn.Parameter], masters: list[Tensor], table: OptimizerTable
    ) -> None:
        """Take the network's parameters and their float32 values, in the same order."""
        self.working = list(working)
        device = self.working[0].device
        self._is_shared = self.working[0].dtype == torch.float32
        self.masters = [p.detach() for p in self.working] if self._is_shared else masters
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for parameter, master, gradient in zip(
            self.working, self.masters, self.gradients, strict=True
        ):
            master.grad = gradient
            parameter.grad = gradient if self._is_shared else torch.zeros_like(parameter)
        self.learning_rate = torch.zeros((), device=device)
        self.gradient_norm = torch.zeros((), device=device)
        self.num_skipped = torch.zeros((), device=device)
        self._max_norm = table.max_gradient_norm
        self._optimizer = torch.optim.AdamW(
            self.masters,
            lr=self.learning_rate,
            betas=(table.beta1, table.beta2),
            eps=table.epsilon,
            weight_decay=table.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the working gradients to the float32 ones, in place."""
        if self._is_shared:
            return
        working = [p.grad for p in self.working]
        torch._foreach_add_(self.gradients, [g.float() for g in working if g is not None])
        torch._foreach_zero_(working)

    @torch.no_grad()
    def update(self, weight_sum: Tensor) -> None:
        """Apply one step of the mean gradient, then clear the gradients.

        Args:
            weight_sum: 0-dim, what the summed gradients are divided by.
        """
        scale = torch.where(weight_sum > 0, 1.0 / weight_sum, torch.zeros_like(weight_sum))
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in self.gradients])
        )
        norm = norm * scale
        clip = (self._max_norm / (norm + _NORM_EPSILON)).clamp_max(1.0)
        is_bad = (weight_sum <= 0) | ~torch.isfinite(norm)
        torch._foreach_mul_(self.gradients, scale * clip)
        # The fused kernel leaves weights, moments and step counts alone where this is 1.
        self._optimizer.found_inf = is_bad.float()
        self._optimizer.step()
        self.gradient_norm.copy_(norm)
        self.num_skipped += is_bad
        torch._foreach_zero_(self.gradients)
        if not self._is_shared:
            torch._foreach_copy_(self.working, self.masters)

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by name, for a checkpoint."""
        tensors = {}
        for index, master in enumerate(self.masters):
            tensors[f"{index}.master"] = master
            for name, value in self._optimizer.state[master].items():
                tensors[f"{index}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore masters and moments, and the working weights from the masters."""
        for index, master in enumerate(self.masters):
            master.copy_(tensors[f"{index}.master"])
            for name in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors.get(f"{index}.{name}")
                if value is not None:
                    state = self._optimizer.state[master]
                    device = (
                        "cpu" if value.ndim == 0 and master.device.type == "cpu" else master.device
                    )
                    state[name] = value.to(device)
        if not self._is_shared:
            torch._foreach_copy_(self.working, self.masters)
