"""A drafter's first weights: random, the target's last layers, or those of a drafter that exists.

`drafter.init_from` names a folder in the z-lab layout, whoever made it. The config says which drafter
is trained, as it does without one: what the two have unlike is named, all of it in one error. Norm
epsilon, rotary base and number of positions alone are the folder's own, since no setting has them.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.config.shared import TargetTable
from common.drafters.dflash.checkpoint import read_spec, read_weights, tensor_misfits
from common.drafters.dflash.config import DrafterSpec
from common.drafters.dflash.initialise import init_from_target, random_init
from common.drafters.dflash.lint import WEIGHTS_FILE
from common.drafters.dflash.model import DFlashDrafter
from common.errors import CheckpointError, ConfigError
from common.target.loading import TargetDescription
from common.target.weights import load_decoder_layers, load_embedding_and_head
from services.drafter_worker.config import WorkerConfig

_SETTINGS = {
    "num_layers": "drafter.num_layers",
    "block_size": "drafter.block_size",
    "intermediate_size": "drafter.intermediate_size",
    "num_heads": "drafter.num_heads",
    "num_kv_heads": "drafter.num_kv_heads",
    "head_dim": "drafter.head_dim",
    "layer_types": "drafter.sliding_window and drafter.full_attention_layers",
    "sliding_window": "drafter.sliding_window",
    "target_layer_ids": "target.target_layer_ids",
    "mask_token_id": "target.mask_token_id",
    "hidden_size": "target.model",
    "vocab_size": "target.model",
    "num_target_layers": "target.model",
}
"""Which setting each part of a drafter's shape comes from."""
_OWN = ("rms_norm_eps", "rope_parameters", "max_position_embeddings")
_log = logging.getLogger(__name__)


def with_own_values(spec: DrafterSpec, folder: Path) -> DrafterSpec:
    """Return the config's shape with what the drafter in `folder` has of its own."""
    found = _read(folder)
    return replace(spec, **{name: getattr(found, name) for name in _OWN})


def initialise(drafter: DFlashDrafter, config: WorkerConfig, target: TargetDescription) -> None:
    """Give a drafter its first weights; raise `ConfigError` where they do not fit."""
    if config.drafter.init_from is not None:
        _init_from_drafter(drafter, config.drafter.init_from, config.target)
        return
    random_init(drafter, config.run.seed)
    if config.drafter.init == "target_layers":
        _init_from_layers(drafter, config, target)


def _init_from_drafter(drafter: DFlashDrafter, folder: Path, target: TargetTable) -> None:
    found = _read(folder)
    differences = _differences(found, drafter.spec)
    try:
        weights = read_weights(folder)
    except CheckpointError as error:
        raise ConfigError(f"drafter.init_from: {'; '.join([str(error), *differences])}") from error
    differences += _foreign_tables(weights, target)
    with torch.device("meta"):  # its file against its own config: each difference is named once
        differences += tensor_misfits(DFlashDrafter(found), weights)
    differences += [
        f"{name} holds NaN or infinity"
        for name, value in weights.items()
        if not torch.isfinite(value.float()).all()  # of float8 there is no other test
    ]
    if differences:
        raise ConfigError(
            f"drafter.init_from {str(folder)!r} is of another drafter: {'; '.join(differences)}; set "
            f"what is named as it has it, or start from another drafter"
        )
    drafter.load_state_dict(weights)
    _log.info("the drafter starts with the weights of %s", folder)


def _read(folder: Path) -> DrafterSpec:
    try:
        return read_spec(folder)
    except CheckpointError as error:
        raise ConfigError(f"drafter.init_from: {error}") from error


def _differences(found: DrafterSpec, spec: DrafterSpec) -> list[str]:
    return [
        f"{name} got {getattr(found, name)!r}, expected {getattr(spec, name)!r} by {setting}"
        for name, setting in _SETTINGS.items()
        if getattr(found, name) != getattr(spec, name)
    ]


def _foreign_tables(weights: dict[str, Tensor], target: TargetTable) -> list[str]:
    """Take embedding and head out of the weights; name those that are not the target's."""
    found = {
        name: weights.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")
        if name in weights
    }  # fmt: skip
    if not found:
        return []
    wrong = []
    for name, tensor in found.items():
        tables = load_embedding_and_head(target, "cpu", tensor.dtype)
        own = tables.embedding if name.startswith("embed") else tables.head
        if not torch.equal(own, tensor):
            wrong.append(
                f"{name} {tuple(tensor.shape)} in {WEIGHTS_FILE} is not the target's, with which a "
                f"drafter is trained here"
            )
    return wrong


def _init_from_layers(
    drafter: DFlashDrafter, config: WorkerConfig, target: TargetDescription
) -> None:
    if not target.family.starts_drafter:
        raise ConfigError(
            f"drafter.init = 'target_layers': got a target of type {target.model_type!r}, whose "
            f"layers are not known to be like the drafter's (two norms, separate projections, a "
            f"SiLU MLP); set drafter.init to 'random'"
        )
    count = config.drafter.num_layers
    if count > target.num_layers:
        raise ConfigError(
            f"init = 'target_layers': got {count} draft layers, expected at most the target's "
            f"{target.num_layers}"
        )
    ids = tuple(range(target.num_layers - count, target.num_layers))
    tensors = load_decoder_layers(config.target, ids, device="cpu", dtype=torch.float32)
    prefixes = [f"layers.{layer}." for layer in ids]
    layers = [
        {name.removeprefix(p): value for name, value in tensors.items() if name.startswith(p)}
        for p in prefixes
    ]
    init_from_target(drafter, layers, tensors["norm.weight"])
