"""AdamW on float32 masters: the rule for what is not a matrix, or for everything."""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.update import Change, Parameters


class AdamWRule:
    """First and second moments of some parameters."""

    def __init__(self, parameters: Parameters, table: OptimizerTable) -> None:
        self.parameters = parameters
        self._table = table
        self._first = [torch.zeros_like(master) for master in parameters.masters]
        self._second = [torch.zeros_like(master) for master in parameters.masters]

    @property
    def moments(self) -> dict[str, list[Tensor]]:
        """What the rule keeps for each parameter, by name."""
        return {"exp_avg": self._first, "exp_avg_sq": self._second}

    def apply(self, gradients: list[Tensor], change: Change) -> None:
        """Change masters and working weights by one step; gradients may be overwritten."""
        if change.scale.is_cuda:
            self._apply_on_gpu(gradients, change)
        else:
            self._apply_on_cpu(gradients, change)

    def _apply_on_gpu(self, gradients: list[Tensor], change: Change) -> None:
        from services.drafter_worker.adamw_kernels import adamw_in_place

        table, number = self._table, change.num_before + 1
        scalars = torch.stack(
            [change.learning_rate, change.scale, 1 - table.beta1**number,
             (1 - table.beta2**number).sqrt(), (~change.is_bad).float()]
        )  # fmt: skip
        parts = (*self.parameters, gradients, self._first, self._second)
        for master, working, gradient, first, second in zip(*parts, strict=True):
            adamw_in_place(master, working, gradient, first, second, scalars, table.beta1,
                           table.beta2, table.epsilon, table.weight_decay)  # fmt: skip

    def _apply_on_cpu(self, gradients: list[Tensor], change: Change) -> None:
        table, masters = self._table, self.parameters.masters
        gradients = [gradient.float() for gradient in gradients]
        torch._foreach_mul_(gradients, change.scale)
        adamw(
            masters, gradients, self._first, self._second, [],
            [change.num_before.clone() for _ in masters],
            fused=True, found_inf=change.is_bad.float(), amsgrad=False, beta1=table.beta1,
            beta2=table.beta2, lr=change.learning_rate, weight_decay=table.weight_decay,
            eps=table.epsilon, maximize=False,
        )  # fmt: skip
        self.parameters.round_to_working()
