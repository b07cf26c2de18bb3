"""Keeps the residual stream after chosen decoder layers while the target runs packed documents.

Layer ids are 0-based decoder layers whose *output* is kept: HF calls that tensor
`hidden_states[id + 1]`, vLLM's capture ids are id + 1, SGLang takes id as it is. Forward hooks
keep only what is asked for; `output_hidden_states` would keep every layer.

A packed row is one sequence whose `position_ids` start from 0 in each document. transformers
reads the document borders from them, but only when no cache and no attention mask is given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from common.errors import CaptureMismatchError


class FeatureTap:
    """Hooks on the decoder layers of one model. Long-lived, or a context manager.

    Owner: the caller of `run_packed`, from one thread. `close` takes the hooks off again.
    """

    def __init__(
        self, model: PreTrainedModel, layer_ids: tuple[int, ...], *, keep_last_normed: bool = False
    ) -> None:
        self.layer_ids = layer_ids
        self._layers = decoder_layers(model)
        if not layer_ids or max(layer_ids) >= len(self._layers):
            raise CaptureMismatchError(
                f"cannot tap layers {list(layer_ids)} of a model with {len(self._layers)} layers: "
                f"expected ids from 0 to {len(self._layers) - 1}"
            )
        self.keeps_last_normed = keep_last_normed
        self._kept: dict[int, torch.Tensor] = {}
        self._last_normed: torch.Tensor | None = None
        self._highest = max(layer_ids)
        self._ends_pass = False
        self._hooks = self._hook()

    def run(self, decoder: nn.Module, **inputs: Any) -> None:
        """Run the decoder up to the highest kept layer; layers above it are not computed.

        Where the last hidden states are kept, run all of it: what a decoder returns has passed its
        final norm, whose form is the family's own affair.
        """
        self._kept.clear()
        self._ends_pass = not self.keeps_last_normed
        try:
            self._last_normed = decoder(**inputs)[0][0]
        except _PassEndedError:
            pass
        finally:
            self._ends_pass = False

    def aux_hidden_states(self) -> torch.Tensor:
        """Return the kept layers of the last run side by side: [T, L*H]."""
        return torch.cat([self._of_row(layer) for layer in self.layer_ids], dim=-1)

    def aux_hidden_states_of_batch(self) -> torch.Tensor:
        """Return the same of a run over b sequences of q tokens: [b, q, L*H]."""
        return torch.cat([self._kept[layer] for layer in self.layer_ids], dim=-1)

    def last_hidden_states_normed(self) -> torch.Tensor | None:
        """Return the last layer's output behind the final norm [T, H], where it is kept."""
        return self._last_normed if self.keeps_last_normed else None

    def close(self) -> None:
        """Take the hooks off and forget what they kept."""
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()
        self._last_normed = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the hooks off for a while: for passes whose features nobody asks for."""
        self.close()
        try:
            yield
        finally:
            self._hooks = self._hook()

    def _hook(self) -> list[RemovableHandle]:
        return [
            self._layers[layer].register_forward_hook(partial(self._keep, layer))
            for layer in sorted(set(self.layer_ids))
        ]

    def __enter__(self) -> "FeatureTap":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _of_row(self, layer: int) -> torch.Tensor:
        if layer not in self._kept:
            raise CaptureMismatchError(
                f"layer {layer} was not kept: got layers {sorted(self._kept)}; run the target first"
            )
        return self._kept[layer][0]

    def _keep(self, layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        # Some families return a tuple whose first entry is the residual stream.
        self._kept[layer] = output[0] if isinstance(output, tuple) else output
        if self._ends_pass and layer == self._highest:
            raise _PassEndedError


class RowFeatures(NamedTuple):
    """What is kept of one row."""

    aux_hidden_states: torch.Tensor  # [T, L*H]
    last_hidden_states_normed: torch.Tensor | None  # [T, H], where the tap keeps them


class _PassEndedError(Exception):
    """Leaves the decoder's forward; never leaves `FeatureTap.run`."""


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the stack of decoder layers with its embedding and final norm, without the head."""
    return model.get_decoder()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers: the first module list as long as the config says."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CaptureMismatchError(
        f"no decoder layers found in {type(model).__name__}: expected a ModuleList of {num_layers}"
    )


@torch.no_grad()
def run_packed(
    model: PreTrainedModel,
    tap: FeatureTap,
    token_ids: torch.Tensor,  # [T]
    position_ids: torch.Tensor,  # [T], from 0 in each document
) -> torch.Tensor:  # [T, L*H]
    """Run one packed row in a single pass and return its aux hidden states."""
    tap.run(
        decoder_of(model),
        input_ids=token_ids[None].long(),
        position_ids=position_ids[None].long(),
        use_cache=False,
    )
    return tap.aux_hidden_states()


def run_row(
    model: PreTrainedModel,
    tap: FeatureTap,
    token_ids: torch.Tensor,  # [T]
    position_ids: torch.Tensor,  # [T], from 0 in each document
    *,
    is_packed: bool,
) -> RowFeatures:
    """Run a row in a single pass, or each document by itself, and return all that the tap keeps.

    Singly is the way for targets whose layers carry state across documents (linear attention).
    """
    starts = [0] if is_packed else (position_ids == 0).nonzero().flatten().tolist()
    aux, last = [], []
    for start, stop in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        aux.append(run_packed(model, tap, token_ids[start:stop], position_ids[start:stop]))
        last.append(tap.last_hidden_states_normed())
    return RowFeatures(_join(aux), _join(last) if tap.keeps_last_normed else None)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
