"""The z-lab layout: `config.json` and `model.safetensors`, loadable by serving engines as it is.

Both places of `rope_theta` and of `block_size` are written, mask id and layer ids are explicit, and
no `causal` key is: engines would read it for every layer. Layer ids are 0-based decoder layers
whose output is taken (vLLM and speculators count the same layer as id + 1).
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.drafters.dflash.config import SLIDING_ATTENTION, DrafterSpec, own_rope
from common.drafters.dflash.findings import RINGDRAFT
from common.drafters.dflash.lint import CONFIG_FILE, WEIGHTS_FILE, read_config
from common.drafters.dflash.model import DFlashDrafter
from common.drafters.dflash.zlab_rules import ARCHITECTURE, zlab_findings
from common.errors import CheckpointError

WeightsDtype = Literal["bfloat16", "float32"]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def write_drafter(
    directory: Path,
    state: dict[str, Tensor],
    spec: DrafterSpec,
    dtype: WeightsDtype = "bfloat16",
) -> None:
    """Write the servable files into an existing directory."""
    write_weights(directory, state, dtype)
    write_config(directory, drafter_config(spec, dtype))


def write_weights(directory: Path, state: dict[str, Tensor], dtype: WeightsDtype) -> None:
    """Write a drafter's tensors; raise `CheckpointError` where one is not finite."""
    weights = {
        name: value.detach().to("cpu", _DTYPES[dtype]).contiguous() for name, value in state.items()
    }
    for name, value in weights.items():
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"tensor {name!r} holds NaN or infinity; {directory} is not written"
            )
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def write_config(directory: Path, config: dict[str, Any]) -> None:
    """Write config.json."""
    text = json.dumps(config, indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def drafter_config(spec: DrafterSpec, dtype: WeightsDtype = "bfloat16") -> dict[str, Any]:
    """Return config.json as readers of every engine need it."""
    return {
        "architectures": [ARCHITECTURE],
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": {
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
            "block_size": spec.block_size,
        },
        **network_config(spec),
        "dtype": dtype,
    }


def network_config(spec: DrafterSpec) -> dict[str, Any]:
    """Return the keys that shape the layers, which every layout has somewhere."""
    sliding = SLIDING_ATTENTION in spec.layer_types
    rope = dict(spec.rope_parameters)
    return {
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(spec.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window if sliding else None,
        "max_window_layers": spec.num_layers,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def read_spec(directory: Path) -> DrafterSpec:
    """Return the spec of a checkpoint, refusing what is missing or means something else here."""
    config = read_config(directory)
    try:
        spec = _spec_of(config)
    except KeyError as error:
        raise CheckpointError(
            f"checkpoint {str(directory)!r}: {CONFIG_FILE} lacks {error}; write it, nothing is guessed"
        ) from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {str(directory)!r}: {CONFIG_FILE} has a value of another kind than its key's: "
            f"{error}; `ringdraft lint` names it"
        ) from error
    misread = [str(found) for found in zlab_findings(config) if RINGDRAFT in found.readers]
    if misread:
        raise CheckpointError(
            f"checkpoint {str(directory)!r}: {CONFIG_FILE} is of another kind of drafter than this "
            f"project computes: {'; '.join(misread)}"
        )
    return spec


def read_drafter(directory: Path, device: torch.device, dtype: torch.dtype) -> DFlashDrafter:
    """Return the drafter of a checkpoint, every tensor matched by name and shape."""
    spec = read_spec(directory)
    drafter = DFlashDrafter(spec)
    load_state(drafter, directory)
    return drafter.to(device, dtype).eval().requires_grad_(requires_grad=False)


def load_state(drafter: DFlashDrafter, directory: Path) -> None:
    """Copy a checkpoint's weights into a drafter; name each tensor that does not match."""
    weights = read_weights(directory)
    _refuse(directory, tensor_misfits(drafter, weights))
    drafter.load_state_dict(weights)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as they are in its file."""
    try:
        return load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {str(directory)!r}: {WEIGHTS_FILE}: {error}") from error


def tensor_misfits(drafter: DFlashDrafter, weights: dict[str, Tensor]) -> list[str]:
    """Name each tensor that is missing, not known, of another shape, or no plain floating point."""
    return [
        *_shape_misfits(drafter, {name: tuple(x.shape) for name, x in weights.items()}),
        *(
            f"{name} has elements of {x.dtype}, expected float32, bfloat16 or float16"
            for name, x in sorted(weights.items())
            if name in drafter.state_dict() and x.dtype not in _PLAIN
        ),
    ]


def check_tensors(directory: Path, spec: DrafterSpec) -> None:
    """Raise `CheckpointError` that names each tensor which does not match; no data is read."""
    try:
        with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
            got = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {str(directory)!r}: {WEIGHTS_FILE}: {error}") from error
    with torch.device("meta"):
        _refuse(directory, _shape_misfits(DFlashDrafter(spec), got))


def _refuse(directory: Path, misfits: list[str]) -> None:
    if misfits:
        raise CheckpointError(
            f"checkpoint {str(directory)!r}: {WEIGHTS_FILE} does not fit its {CONFIG_FILE}: "
            f"{'; '.join(misfits)}"
        )


def _shape_misfits(drafter: DFlashDrafter, got: dict[str, tuple[int, ...]]) -> list[str]:
    expected = {name: tuple(x.shape) for name, x in drafter.state_dict().items()}
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - got.keys())),
        *(f"{name} is not known" for name in sorted(got.keys() - expected.keys())),
        *(
            f"{name} got {got[name]}, expected {expected[name]}"
            for name in sorted(expected.keys() & got.keys())
            if got[name] != expected[name]
        ),
    ]


def _spec_of(config: dict[str, Any]) -> DrafterSpec:
    inner = config["dflash_config"]
    return DrafterSpec(
        num_layers=config["num_hidden_layers"],
        block_size=inner["block_size"] if "block_size" in inner else config["block_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=_rope_of(config),
        max_position_embeddings=config["max_position_embeddings"],
        num_target_layers=config["num_target_layers"],
        target_layer_ids=tuple(inner["target_layer_ids"]),
        mask_token_id=inner["mask_token_id"],
        layer_types=tuple(config["layer_types"]),
        sliding_window=config["sliding_window"] or 0,
        loss_decay_gamma=0.0,
    )


def _rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`; older files have `rope_theta`, and `rope_scaling` where it is scaled."""
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", "default")
        rope = {"rope_type": kind, "rope_theta": config["rope_theta"], **scaling}
    return own_rope(rope) if rope.get("rope_type", "default") == "default" else rope
