"""Refuses drafters, perhaps trained elsewhere, that would not be scored as what they are.

A key that changes what the network computes and is not known here must not be passed over: the
figures would be those of another drafter.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.drafters.dflash.checkpoint import ARCHITECTURE, CONFIG_FILE, WEIGHTS_FILE
from common.drafters.dflash.config import DrafterSpec
from common.drafters.dflash.model import DFlashDrafter
from common.errors import ConfigError

# What each key may say, beside being absent or null.
_TOP = {
    "architectures": [ARCHITECTURE],
    "attention_bias": False,
    "hidden_act": "silu",
    "is_causal": None,
}
_INNER = {
    "causal": None,
    "use_swa": False,
    "swa_window_size": None,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "projector_type": "dflash",
    "shift_label": False,
    "sample_from_anchor": False,
    "conv_kernel_size": None,
    "selector_rank": None,
    "markov_rank": None,
    "attention_sink_bias": False,
    "attention_value_scale": None,
}


def check_is_scored_as_it_is(checkpoint: Path, spec: DrafterSpec) -> None:
    """Raise `ConfigError` for keys that are not known here and tensors that do not fit the spec."""
    config = json.loads((checkpoint / CONFIG_FILE).read_text(encoding="utf-8"))
    wrong = [*_odd_keys(config, _TOP), *_odd_keys(config["dflash_config"], _INNER)]
    if wrong:
        raise ConfigError(
            f"drafter {str(checkpoint)!r}: {CONFIG_FILE} asks for what is not known here: "
            f"{'; '.join(wrong)}; its figures would be another drafter's"
        )
    wrong = _odd_tensors(checkpoint, spec)
    if wrong:
        raise ConfigError(
            f"drafter {str(checkpoint)!r}: {WEIGHTS_FILE} does not fit its {CONFIG_FILE}: "
            f"{'; '.join(wrong)}"
        )


def _odd_keys(config: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    return [
        f"{key} got {config[key]!r}, expected {'no such key' if value is None else repr(value)}"
        for key, value in allowed.items()
        if config.get(key) is not None and config[key] != value
    ]


def _odd_tensors(checkpoint: Path, spec: DrafterSpec) -> list[str]:
    with torch.device("meta"):
        expected = {name: tuple(x.shape) for name, x in DFlashDrafter(spec).state_dict().items()}
    try:
        with safe_open(checkpoint / WEIGHTS_FILE, framework="pt") as file:
            names = list(file.keys())
            got = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        return [f"it cannot be read: {error}"]
    missing = [f"{name} is missing" for name in sorted(expected.keys() - got.keys())]
    more = [f"{name} is not known" for name in sorted(got.keys() - expected.keys())]
    shapes = [
        f"{name} got {got[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & got.keys())
        if got[name] != expected[name]
    ]
    return [*missing, *more, *shapes]
