"""Start-up checks on the real target and real rows: a run that would train on noise never starts."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common.errors import CaptureMismatchError
from common.target.checks import check_features, check_float8, check_head, check_isolation
from common.target.features import FeatureTap
from services.target_server.packing import PackedRow

_MAX_DOCUMENTS = 4


@dataclass(frozen=True)
class TargetChecks:
    """What the checks found."""

    is_packed: bool
    """Whether packed documents have the features they have singly."""
    results: dict[str, str]


def check_target(
    model: PreTrainedModel, tap: FeatureTap, row: PackedRow, *, is_float8: bool
) -> TargetChecks:
    """Compare features with the model's own hidden states, and packed with single documents.

    Where rows carry the last hidden states, compare what the head makes of them with the logits;
    where rows are in float8, measure what they lose.
    """
    device = next(model.parameters()).device
    documents = [
        torch.from_numpy(row.token_ids[d.start : d.start + d.length]).to(device)
        for d in _first_documents(row)
    ]
    results = {}
    for layer in check_features(model, tap, documents[0]):
        text = f"cosine {layer.cosine:.6f}, error {layer.error:.1e}, neighbours {layer.neighbour_error:.1e}"
        if not layer.holds:
            raise CaptureMismatchError(
                f"layer {layer.layer_id}: kept features are not its output ({text}); this target's "
                f"family is not supported as it is, see target.target_layer_ids"
            )
        results[f"layer_{layer.layer_id}"] = text
    isolation = check_isolation(model, tap, documents)
    results["packing"] = (
        f"{'isolated' if isolation.is_isolated else 'run separately'}: gap {isolation.gap:.1e}, "
        f"tolerance {isolation.tolerance:.1e}"
    )
    if tap.keeps_last_normed:
        results["head"] = _checked_head(model, tap, documents[0])
    if is_float8:
        lost = check_float8(model, tap, documents[0])
        results["float8"] = (
            f"error {lost.error:.1e}, cosine {lost.cosine:.6f}, at most {lost.layer_error:.1e} in a "
            f"token's layer (layer {lost.layer_id})"
        )
    return TargetChecks(isolation.is_isolated, results)


def _checked_head(model: PreTrainedModel, tap: FeatureTap, token_ids: torch.Tensor) -> str:
    head = check_head(model, tap, token_ids)
    text = f"error {head.error:.1e}"
    if not head.holds:
        raise CaptureMismatchError(
            f"the target's logits are not its head's product with its last hidden states ({text}): "
            f"it scales or caps them, which losses against its distribution do not know; set "
            f"target.last_hidden_states_normed to false and drafter.loss to 'cross_entropy' or 'dpace'"
        )
    return text


def _first_documents(row: PackedRow) -> Iterable:
    documents = list(row.documents[:_MAX_DOCUMENTS])
    # A row of one document is checked against itself twice over.
    return documents if len(documents) > 1 else documents * 2
