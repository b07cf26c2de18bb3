"""What an update rule is given: its parameters, and the change that the optimizer has decided on."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Parameters(NamedTuple):
    """Some of a network's parameters: the same tensors twice where it computes in float32."""

    masters: list[Tensor]
    """float32."""
    working: list[Tensor]
    """What the network computes with."""

    def round_to_working(self) -> None:
        """Bring the masters' values into the working weights."""
        if self.working[0].dtype != torch.float32:
            torch._foreach_copy_(self.working, self.masters)


class Change(NamedTuple):
    """One step, as 0-dim tensors on the device."""

    learning_rate: Tensor
    scale: Tensor
    """Makes the mean gradient, clipped, of the summed one."""
    is_bad: Tensor
    """Whether nothing may change: no weight, or a gradient that is not finite."""
    num_before: Tensor
    """Steps applied before this one."""


class UpdateRule(Protocol):
    """A way to change parameters by their gradients."""

    parameters: Parameters

    @property
    def moments(self) -> dict[str, list[Tensor]]:
        """What the rule keeps for each parameter, by name."""

    def apply(self, gradients: list[Tensor], change: Change) -> None:
        """Change masters and working weights by one step; gradients may be overwritten."""
