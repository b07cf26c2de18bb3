"""Start-up checks on the real target and real rows: a run that would train on noise never starts.

    before the weights are read   tokenizer, mask token
    on the first row              tables, embedding, layers, head, packing, float8

Each has a line in the log and in /status. The first that fails ends the run.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.config.shared import TargetTable
from common.errors import TargetCheckError
from common.target.checks import (
    check_embedding,
    check_features,
    check_float8,
    check_head,
    check_isolation,
    tables_differ,
)
from common.target.features import FeatureTap
from common.target.loading import TargetDescription, num_token_ids, resolve_mask_token_id
from common.target.weights import FrozenTables
from services.target_server.packing import PackedRow

_MAX_DOCUMENTS = 4
_log = logging.getLogger(__name__)


class CheckList:
    """Results so far, by the name of the check."""

    def __init__(self) -> None:
        self.results: dict[str, str] = {}

    def holds(self, name: str, text: str) -> None:
        """Note a check that holds."""
        self.results[name] = text
        _log.info("check %s: %s", name, text)

    def warns(self, name: str, text: str) -> None:
        """Note what may be meant and is more often a mistake."""
        self.results[name] = f"warning: {text}"
        _log.warning("check %s: %s", name, text)

    def fails(self, name: str, text: str, way_out: str) -> TargetCheckError:
        """Note a check that fails; return what to raise."""
        self.results[name] = f"failed: {text}"
        return TargetCheckError(f"check {name} of the target: {text}; {way_out}", self.results)


@dataclass(frozen=True)
class TargetChecks:
    """What the checks found."""

    is_packed: bool
    """Whether packed documents have the features they have singly."""
    results: dict[str, str]


def check_vocabulary(
    checks: CheckList, table: TargetTable, target: TargetDescription, tokenizer: Tokenizer
) -> int:
    """Check that every token and the mask have embedding rows; return the mask token's id."""
    num_ids, num_rows = num_token_ids(tokenizer), target.vocab_size
    if num_ids > num_rows:
        raise checks.fails(
            "tokenizer",
            f"its ids reach {num_ids - 1}, expected less than the embedding's {num_rows} rows",
            "put the tokenizer beside target.model that this model was trained with",
        )
    checks.holds("tokenizer", f"{num_ids} ids, {num_rows} embedding rows")
    mask = resolve_mask_token_id(table, num_ids, num_rows)
    token = tokenizer.convert_ids_to_tokens(mask) if mask < num_ids else None
    if token is not None and not _is_reserved(tokenizer, mask):
        checks.warns(
            "mask_token",
            f"row {mask} is the token {token!r} of ordinary text: the drafter cannot tell it from a "
            f"slot to fill; set target.mask_token_id to -1 or to a reserved token",
        )
    else:
        checks.holds("mask_token", f"row {mask}, {token!r}" if token else f"row {mask}, no token's")
    return mask


def check_target(
    checks: CheckList,
    model: PreTrainedModel,
    tap: FeatureTap,
    row: PackedRow,
    *,
    target: TargetDescription,
    tables: FrozenTables,
    mask_token_id: int,
    is_float8: bool,
) -> TargetChecks:
    """Compare what drafters get with the model's own: tables, features, head; packed and single."""
    device = next(model.parameters()).device
    documents = [
        torch.from_numpy(row.token_ids[d.start : d.start + d.length]).to(device)
        for d in row.documents
    ]
    few = documents[:_MAX_DOCUMENTS]
    # A row of one document is checked against itself twice over.
    few = few if len(few) > 1 else few * 2
    _check_tables(checks, model, target, tables)
    _check_mask_row(checks, row, tables, mask_token_id)
    _check_embedding(checks, model, target, tables, few[0])
    _check_layers(checks, model, tap, few[0])
    _check_head(checks, model, target, tables, documents, needs_all=tap.keeps_last_normed)
    is_packed = _check_packing(checks, model, tap, few, target)
    if is_float8:
        lost = check_float8(model, tap, few[0])
        checks.holds(
            "float8",
            f"error {lost.error:.1e}, cosine {lost.cosine:.6f}, at most {lost.layer_error:.1e} in a "
            f"token's layer (layer {lost.layer_id})",
        )
    return TargetChecks(is_packed, checks.results)


def _check_tables(
    checks: CheckList, model: PreTrainedModel, target: TargetDescription, tables: FrozenTables
) -> None:
    expected = [target.vocab_size, target.hidden_size]
    for name, table in (("embedding", tables.embedding), ("head", tables.head)):
        if list(table.shape) != expected:
            raise checks.fails(
                "tables",
                f"the {name} in its files is {list(table.shape)}, expected {expected} of its config",
                "fetch the model again: config.json and weights are not of one model",
            )
    difference = tables_differ(model, tables)
    if difference is not None:
        raise checks.fails(
            "tables",
            difference,
            "drafters read these rows: save the model with save_pretrained and point target.model "
            "at that folder",
        )
    is_tied = tables.head is tables.embedding
    text = "one tensor" if is_tied else "two tensors"
    checks.holds("tables", f"embedding and head {expected}, {text}, equal to the model's")


def _check_mask_row(
    checks: CheckList, row: PackedRow, tables: FrozenTables, mask_token_id: int
) -> None:
    length = tables.embedding[mask_token_id].float().norm().item()
    num_seen = int((row.token_ids[: row.used_tokens] == mask_token_id).sum())
    if length != length or length == float("inf"):
        raise checks.fails(
            "mask_row",
            f"embedding row {mask_token_id} holds NaN or infinity",
            "set target.mask_token_id to a row that is finite",
        )
    if num_seen:
        checks.warns(
            "mask_row",
            f"token {mask_token_id} is {num_seen} times in the first row: the drafter cannot tell it "
            f"from a slot to fill; set target.mask_token_id to one that never occurs",
        )
    else:
        checks.holds("mask_row", f"norm {length:.3g}, not in the first row")


def _check_embedding(
    checks: CheckList,
    model: PreTrainedModel,
    target: TargetDescription,
    tables: FrozenTables,
    token_ids: torch.Tensor,
) -> None:
    found = check_embedding(model, target, tables, token_ids)
    text = f"rows times {found.scale:.6g} are the target's inputs to {found.error:.1e}"
    if found.holds:
        checks.holds("embedding", text)
    elif target.family.norm is None:
        checks.warns("embedding", f"{text}: the target scales or shifts them, its drafter will not")
    else:
        raise checks.fails(
            "embedding",
            f"{text}, expected at most {found.tolerance:.1e}",
            _OTHER_FAMILY.format(target.model_type),
        )


def _check_layers(
    checks: CheckList, model: PreTrainedModel, tap: FeatureTap, token_ids: torch.Tensor
) -> None:
    for layer in check_features(model, tap, token_ids):
        name = f"layer_{layer.layer_id}"
        text = (
            f"cosine {layer.cosine:.6f}, error {layer.error:.1e}, "
            f"neighbours {layer.neighbour_cosine:.6f}, {layer.neighbour_error:.1e}, rms {layer.rms:.3g}"
        )
        if not layer.holds:
            raise checks.fails(
                name,
                f"kept features are not hidden_states[{layer.layer_id + 1}] ({text})",
                "choose other layers in target.target_layer_ids, or another target",
            )
        checks.holds(name, text)


def _check_head(
    checks: CheckList,
    model: PreTrainedModel,
    target: TargetDescription,
    tables: FrozenTables,
    documents: Sequence[torch.Tensor],
    *,
    needs_all: bool,
) -> None:
    head = check_head(model, target, tables, documents)
    text = (
        f"argmax equal at {head.num_equal} of {head.num_positions} positions, {head.num_ties} ties, "
        f"error {head.error:.1e}"
    )
    if not head.holds:
        raise checks.fails(
            "head",
            f"norm and head of the last layer's output do not make the target's logits ({text})",
            _OTHER_FAMILY.format(target.model_type),
        )
    if head.is_whole:
        checks.holds("head", text)
    elif needs_all:
        raise checks.fails(
            "head",
            f"the target scales or shifts its logits ({text}), which losses against its distribution "
            f"do not know",
            "set target.last_hidden_states_normed to false and drafter.loss to 'cross_entropy' or "
            "'dpace'",
        )
    else:
        checks.warns(
            "head", f"the target scales or shifts its logits, draft logits are not: {text}"
        )


def _check_packing(
    checks: CheckList,
    model: PreTrainedModel,
    tap: FeatureTap,
    documents: Sequence[torch.Tensor],
    target: TargetDescription,
) -> bool:
    """Return whether documents are kept apart; where they are not, they are run one by one."""
    found = check_isolation(model, tap, documents)
    text = (
        f"{'isolated' if found.is_isolated else 'run separately'}: gap {found.gap:.1e}, noise "
        f"{found.noise:.1e}, tolerance {found.tolerance:.1e}"
    )
    if target.family.is_packed and not found.is_isolated:
        checks.warns("packing", f"{text}; targets of type {target.model_type!r} were isolated")
    else:
        checks.holds("packing", text)
    return found.is_isolated


_OTHER_FAMILY = (
    "its files are not what targets of type {!r} were tested with (a changed model, or another "
    "version of transformers): choose another target, or the transformers of constraints.txt"
)


def _is_reserved(tokenizer: Tokenizer, token_id: int) -> bool:
    """Say whether a token is one that text does not turn into."""
    added = tokenizer.added_tokens_decoder.get(token_id)
    return added is not None and added.special
