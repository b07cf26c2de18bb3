"""Start-up checks of the captured features on the real target; the server decides what follows.

The errors they look for are silent: a layer id that is off by one costs a few percent of acceptance,
documents that see each other train a drafter on features that serving never has, and a head that is
not the target's own makes drafts of another vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from common.float8 import dequantise, quantise
from common.target.families import NormForm
from common.target.features import FeatureTap, decoder_layers, decoder_of, run_packed
from common.target.loading import TargetDescription
from common.target.weights import FrozenTables

_LEAST_COSINE = 0.999
_LEAST_MARGIN = 4.0
# Relative errors by which runs of other shapes differ.
_NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
# Rounding grows with a target's depth: how far above the first document's, which none precedes, others' may
# lie, and where it ends, since a leak measures 0.3 and more.
_NOISE_MARGIN = 4.0
_MOST_NOISE = 0.1
# A document feels those before it most in its first tokens.
_FIRST_TOKENS = 16
# Both sides of the head's check are the same product.
_HEAD_NOISE = 0.01
_HEAD_POSITIONS = 1000
# Of bfloat16 logits about 2 % have another likeliest token.
_LEAST_EQUAL = 0.9
# Logits are wide: these many tokens' exist in float32 at once.
_CHUNK_TOKENS = 128
_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class LayerCheck:
    """One kept layer against the model's own hidden states."""

    layer_id: int
    cosine: float
    """Least cosine over tokens with `hidden_states[layer_id + 1]`."""
    error: float
    """Relative error against `hidden_states[layer_id + 1]`."""
    rms: float
    """Root mean square of its features; one layer far above the others drowns them in `fc`."""
    neighbour_cosine: float
    """Larger of the least cosines with the outputs of the layers before and after."""
    neighbour_error: float
    """Smaller of the relative errors against the outputs of the layers before and after."""

    @property
    def holds(self) -> bool:
        """Whether this is that layer's output and plainly no neighbour's."""
        is_nearer = self.neighbour_cosine < self.cosine
        is_plain = self.neighbour_error > _LEAST_MARGIN * self.error
        return self.cosine > _LEAST_COSINE and is_nearer and is_plain


@dataclass(frozen=True)
class IsolationCheck:
    """Packed documents against the same documents run singly."""

    gap: float
    """Largest over documents of the mean relative error of their first tokens."""
    noise: float
    """The same of the first document, which has none before it: what rounding makes of it here."""
    tolerance: float
    """What rounding may make of any."""

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
class EmbeddingCheck:
    """The embedding rows that a drafter reads, times the family's scale, against the target's inputs."""

    scale: float
    error: float
    """Largest over tokens of the relative error."""
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether these rows are what the target is fed."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class HeadCheck:
    """What norm and head make of the last layer's output, against the target's own logits."""

    num_positions: int
    num_equal: int
    """Positions whose likeliest token is the same."""
    num_ties: int
    """Positions whose likeliest tokens differ and have the same logit but for rounding."""
    error: float
    """Largest over tokens of the relative error of the logits."""

    @property
    def holds(self) -> bool:
        """Whether they choose the target's tokens, counted ties aside."""
        is_equal = self.num_equal + self.num_ties == self.num_positions
        return is_equal and self.num_equal >= _LEAST_EQUAL * self.num_positions

    @property
    def is_whole(self) -> bool:
        """Whether they make the target's distribution too, not its choices alone."""
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
    noise = errors[0]
    tolerance = min(max(_NOISE[packed.dtype], _NOISE_MARGIN * noise), _MOST_NOISE)
    return IsolationCheck(max(errors), noise, tolerance)


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
def check_embedding(
    model: PreTrainedModel,
    target: TargetDescription,
    tables: FrozenTables,
    token_ids: torch.Tensor,
) -> EmbeddingCheck:
    """Compare raw rows of one document [T], times the family's scale, with what enters layer 0."""
    entered = []
    first = decoder_layers(model)[0]
    hook = first.register_forward_pre_hook(
        lambda _layer, given, named: entered.append(given[0] if given else named["hidden_states"]),
        with_kwargs=True,
    )
    positions = torch.arange(len(token_ids), device=token_ids.device)
    try:
        with FeatureTap(model, (0,)) as tap:  # no layer above is run
            run_packed(model, tap, token_ids, positions)
    finally:
        hook.remove()
    scale = target.family.embedding_scale(target.hidden_size)
    rows = tables.embedding[token_ids.long()].float() * scale
    error = _errors_by_token(rows, entered[0][0]).max().item()
    return EmbeddingCheck(scale, error, _NOISE[entered[0].dtype])


@torch.no_grad()
def check_head(
    model: PreTrainedModel,
    target: TargetDescription,
    tables: FrozenTables,
    documents: Sequence[torch.Tensor],
) -> HeadCheck:
    """Compare logits of norm and head, as the tables have it, with the model's own.

    The norm is the family's formula over the last layer's raw output, so that a decoder without its
    norm fails; of an untested family it is what the decoder returns. Documents [T_i] are run one by
    one, until there are 1,000 positions.
    """
    equal = ties = 0
    errors: list[float] = []
    lengths: list[int] = []
    for token_ids in _first_tokens(documents, _HEAD_POSITIONS):
        with FeatureTap(model, (target.num_layers - 1,)) as tap:
            own = model(input_ids=token_ids[None].long(), use_cache=False).logits[0]
            normed = _last_normed(model, target, token_ids, tap.aux_hidden_states())
        lengths.append(len(token_ids))
        for rows in torch.arange(len(token_ids), device=own.device).split(_CHUNK_TOKENS):
            made = _logits(model, target, tables, normed[rows]).float()
            expected = own[rows].float()
            errors.append(_errors_by_token(made, expected).max().item())
            is_equal = made.argmax(-1) == expected.argmax(-1)
            equal += int(is_equal.sum())
            ties += int((_is_tied(made, expected, _NOISE[own.dtype]) & ~is_equal).sum())
    return HeadCheck(sum(lengths), equal, ties, max(errors))


def tables_differ(model: PreTrainedModel, tables: FrozenTables) -> str | None:
    """Say how the tables that a drafter reads differ from those of the loaded model, if they do."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    pairs = {
        "embedding": (tables.embedding, embedding.weight),
        "head": (tables.head, head.weight),
    }
    for name, (read, loaded) in pairs.items():
        if read.shape != loaded.shape:
            return f"{name}: {list(read.shape)} in the files, {list(loaded.shape)} in the model"
        num_unlike = _num_unlike_rows(read, loaded)
        if num_unlike:
            return f"{name}: {num_unlike} of {len(read)} rows in the files are not the model's"
    return None


def packing_is_isolated(
    model: PreTrainedModel, tap: FeatureTap, documents: Sequence[torch.Tensor]
) -> bool:
    """Say whether packed documents of this target have the features they have singly."""
    return check_isolation(model, tap, documents).is_isolated


def _num_unlike_rows(read: torch.Tensor, loaded: torch.Tensor) -> int:
    """Count rows that differ in a bit: NaN equals itself. In parts, since tables are large."""
    parts = zip(read.split(_CHUNK_ROWS), loaded.detach().split(_CHUNK_ROWS), strict=True)
    return sum(
        int((mine.to(theirs.dtype).view(torch.uint8) != theirs.view(torch.uint8)).any(-1).sum())
        for mine, theirs in parts
    )


def final_normed(form: NormForm, norm: nn.Module, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return hidden states [T, H] behind a final norm of this form, with the weights of `norm`."""
    wide, weight = x.float(), norm.weight.float()
    if form == "layer_norm":
        return nn.functional.layer_norm(wide, weight.shape, weight, norm.bias.float(), eps).to(
            x.dtype
        )
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "one_plus_weight":
        return (wide * (1 + weight)).to(x.dtype)
    # Most families round before they weigh.
    return wide.to(x.dtype) * norm.weight


def _last_normed(
    model: PreTrainedModel, target: TargetDescription, token_ids: torch.Tensor, raw: torch.Tensor
) -> torch.Tensor:
    """Return the last layer's output `raw` [T, H] of a document behind the final norm."""
    family, decoder = target.family, decoder_of(model)
    if family.norm is None:
        return decoder(input_ids=token_ids[None].long(), use_cache=False)[0][0]
    norm = decoder.get_submodule(family.final_norm)
    return final_normed(family.norm, norm, raw, target.rms_norm_eps)


def _logits(
    model: PreTrainedModel,
    target: TargetDescription,
    tables: FrozenTables,
    normed: torch.Tensor,
) -> torch.Tensor:
    bias = model.get_output_embeddings().bias if target.family.has_head_bias else None
    logits = nn.functional.linear(normed, tables.head, bias)
    cap = target.logit_softcap
    return torch.tanh(logits / cap) * cap if cap else logits


def _is_tied(made: torch.Tensor, own: torch.Tensor, noise: float) -> torch.Tensor:
    """Say of each row [T] whether `made`'s likeliest token is as likely by `own`, but for rounding."""
    chosen = own.gather(-1, made.argmax(-1, keepdim=True))[:, 0]
    return own.amax(-1) - chosen <= noise * own.abs().amax(-1)


def _first_tokens(documents: Sequence[torch.Tensor], num_tokens: int) -> Iterator[torch.Tensor]:
    """Yield documents, the last one cut, until they have `num_tokens` tokens together."""
    for document in documents:
        if num_tokens > 0:
            yield document[:num_tokens]
        num_tokens -= len(document)


def _check_layer(layer: int, kept: torch.Tensor, own: tuple[torch.Tensor, ...]) -> LayerCheck:
    expected = own[layer + 1][0].float()
    neighbours = [own[layer][0].float(), own[layer + 2][0].float()]
    return LayerCheck(
        layer_id=layer,
        cosine=cosine_similarity(kept, expected, dim=-1).min().item(),
        error=_errors_by_token(kept, expected).mean().item(),
        rms=kept.pow(2).mean().sqrt().item(),
        neighbour_cosine=max(
            cosine_similarity(kept, other, dim=-1).min().item() for other in neighbours
        ),
        neighbour_error=min(_errors_by_token(kept, other).mean().item() for other in neighbours),
    )


def _errors_by_token(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    difference = (got.float() - expected.float()).norm(dim=-1)
    return difference / expected.float().norm(dim=-1).clamp_min(1e-12)
