"""Start-up checks of the captured features on the real target; the server decides what follows.

Both errors they look for are silent: a layer id that is off by one costs a few percent of
acceptance, and documents that see each other train a drafter on features that serving never has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from common.float8 import dequantise, quantise
from common.target.features import FeatureTap, decoder_of, run_packed, run_row

_LEAST_COSINE = 0.999
_LEAST_MARGIN = 4.0
# Relative errors by which runs of other shapes differ; a leak measures 0.3 and more.
_NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
# A document feels those before it most in its first tokens.
_FIRST_TOKENS = 16
# Both sides of the head's check are the same product; its logits are wide, so of a few tokens.
_HEAD_NOISE = 0.01
_HEAD_TOKENS = 128


@dataclass(frozen=True)
class LayerCheck:
    """One kept layer against the model's own hidden states."""

    layer_id: int
    cosine: float
    """Least cosine over tokens with `hidden_states[layer_id + 1]`."""
    error: float
    """Relative error against `hidden_states[layer_id + 1]`."""
    neighbour_error: float
    """Smaller of the relative errors against the outputs of the layers before and after."""

    @property
    def holds(self) -> bool:
        """Whether this is that layer's output and plainly no neighbour's."""
        return self.cosine > _LEAST_COSINE and self.neighbour_error > _LEAST_MARGIN * self.error


@dataclass(frozen=True)
class IsolationCheck:
    """Packed documents against the same documents run singly."""

    gap: float
    """Largest over documents of the mean relative error of their first tokens."""
    tolerance: float
    """What rounding may make of it in the model's element type."""

    @property
    def is_isolated(self) -> bool:
        """Whether no document feels the others."""
        return self.gap <= self.tolerance


@dataclass(frozen=True)
class Float8Check:
    """What a row in float8 keeps of one document's features."""

    error: float
    """Mean over tokens of the relative error."""
    layer_error: float
    """Largest relative error that a token has in one layer."""
    layer_id: int
    """The layer that has it."""
    cosine: float
    """Least cosine over tokens."""


@dataclass(frozen=True)
class HeadCheck:
    """The target's logits against its head's product with what a tap keeps of the last layer."""

    error: float
    """Largest over tokens of the relative error."""

    @property
    def holds(self) -> bool:
        """Whether the product alone makes the target's distribution."""
        return self.error <= _HEAD_NOISE


@torch.no_grad()
def check_features(
    model: PreTrainedModel, tap: FeatureTap, token_ids: torch.Tensor
) -> tuple[LayerCheck, ...]:
    """Compare what the tap keeps for one document [T] with `output_hidden_states`."""
    positions = torch.arange(len(token_ids), device=token_ids.device)
    kept = run_packed(model, tap, token_ids, positions).float()
    own = decoder_of(model)(
        input_ids=token_ids[None].long(),
        position_ids=positions[None],
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    parts = kept.chunk(len(tap.layer_ids), dim=-1)
    return tuple(
        _check_layer(layer, part, own) for layer, part in zip(tap.layer_ids, parts, strict=True)
    )


def check_isolation(
    model: PreTrainedModel, tap: FeatureTap, documents: Sequence[torch.Tensor]
) -> IsolationCheck:
    """Run documents (at least two, each [T_i] of real ids) packed and singly, and compare."""
    positions = [torch.arange(len(ids), device=ids.device) for ids in documents]
    packed = run_packed(model, tap, torch.cat(list(documents)), torch.cat(positions))
    errors = []
    for ids, position_ids, part in zip(
        documents, positions, packed.split([len(ids) for ids in documents]), strict=True
    ):
        alone = run_packed(model, tap, ids, position_ids)
        errors.append(_errors_by_token(part, alone)[:_FIRST_TOKENS].mean().item())
    return IsolationCheck(gap=max(errors), tolerance=_NOISE[packed.dtype])


def check_float8(model: PreTrainedModel, tap: FeatureTap, token_ids: torch.Tensor) -> Float8Check:
    """Write the features of one document [T] as float8 and read them back."""
    positions = torch.arange(len(token_ids), device=token_ids.device)
    kept = run_packed(model, tap, token_ids, positions)
    got = torch.empty_like(kept)
    values = torch.empty_like(kept, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(kept), device=kept.device)
    quantise(kept, values, scales)
    dequantise(values, scales, got)
    by_layer = [
        _errors_by_token(*parts).max().item()
        for parts in zip(*(x.chunk(len(tap.layer_ids), dim=-1) for x in (got, kept)), strict=True)
    ]
    worst = by_layer.index(max(by_layer))
    return Float8Check(
        error=_errors_by_token(got, kept).mean().item(),
        layer_error=by_layer[worst],
        layer_id=tap.layer_ids[worst],
        cosine=cosine_similarity(got.float(), kept.float(), dim=-1).min().item(),
    )


@torch.no_grad()
def check_head(model: PreTrainedModel, tap: FeatureTap, token_ids: torch.Tensor) -> HeadCheck:
    """Compare the head's product with the last hidden states of one document [T] with the logits.

    A target that scales or caps its logits, or whose head has a bias, has another distribution than
    its head's weight makes. The tap must keep the last hidden states.
    """
    token_ids = token_ids[:_HEAD_TOKENS]
    positions = torch.arange(len(token_ids), device=token_ids.device)
    last = run_row(model, tap, token_ids, positions, is_packed=True).last_hidden_states_normed
    made = last @ model.get_output_embeddings().weight.T
    own = model(
        input_ids=token_ids[None].long(), position_ids=positions[None], use_cache=False
    ).logits[0]
    return HeadCheck(error=_errors_by_token(made, own).max().item())


def packing_is_isolated(
    model: PreTrainedModel, tap: FeatureTap, documents: Sequence[torch.Tensor]
) -> bool:
    """Say whether packed documents of this target have the features they have singly."""
    return check_isolation(model, tap, documents).is_isolated


def _check_layer(layer: int, kept: torch.Tensor, own: tuple[torch.Tensor, ...]) -> LayerCheck:
    expected = own[layer + 1][0].float()
    neighbours = [own[layer][0].float(), own[layer + 2][0].float()]
    return LayerCheck(
        layer_id=layer,
        cosine=cosine_similarity(kept, expected, dim=-1).min().item(),
        error=_errors_by_token(kept, expected).mean().item(),
        neighbour_error=min(_errors_by_token(kept, other).mean().item() for other in neighbours),
    )


def _errors_by_token(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    difference = (got.float() - expected.float()).norm(dim=-1)
    return difference / expected.float().norm(dim=-1).clamp_min(1e-12)
