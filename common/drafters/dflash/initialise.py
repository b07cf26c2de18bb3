"""Initial weights: random, or the target's own last layers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from common.drafters.dflash.model import DFlashDrafter
from common.errors import ConfigError

INIT_STD = 0.02


def random_init(drafter: DFlashDrafter, seed: int) -> None:
    """Draw every matrix from N(0, 0.02) with its own generator; norms stay at one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                values = torch.randn(module.weight.shape, generator=generator) * INIT_STD
                module.weight.copy_(values)


def init_from_target(
    drafter: DFlashDrafter,
    layers: Sequence[Mapping[str, Tensor]],
    final_norm: Tensor,
) -> None:
    """Start the draft layers from target layers, `norm` from its final norm, `fc` from one feature.

    `fc` passes the last kept feature and ignores the others; `hidden_norm` takes the first layer's
    input norm, since that is what the copied key and value projections saw. Norms of heads that the
    target lacks stay at one.

    Args:
        layers: for each draft layer the target layer's tensors, named as inside the layer
            (`self_attn.q_proj.weight`, `mlp.up_proj.weight`, ...).
        final_norm: [H] weight of the target's final norm.
    """
    spec = drafter.spec
    if len(layers) != spec.num_layers:
        raise ConfigError(
            f"init = 'target_layers' got {len(layers)} target layers, expected {spec.num_layers}"
        )
    with torch.no_grad():
        for index, (layer, source) in enumerate(zip(drafter.layers, layers, strict=True)):
            _copy_layer(index, layer, source)
        drafter.norm.weight.copy_(final_norm)
        drafter.hidden_norm.weight.copy_(layers[0]["input_layernorm.weight"])
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)


def _copy_layer(index: int, layer: nn.Module, source: Mapping[str, Tensor]) -> None:
    for name, parameter in layer.named_parameters():
        value = source.get(name)
        if value is None and name.endswith(("q_norm.weight", "k_norm.weight")):
            continue
        if value is None or value.shape != parameter.shape:
            got = "nothing" if value is None else tuple(value.shape)
            raise ConfigError(
                f"init = 'target_layers': {name} of draft layer {index} got {got}, expected "
                f"{tuple(parameter.shape)}; keep the target's shape, or use init = 'random'"
            )
        parameter.copy_(value)
