"""Compares a drafter's tensors, perhaps of another trainer, with its config, before a target is loaded."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.drafters.dflash.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from common.drafters.dflash.config import DrafterSpec
from common.drafters.dflash.model import DFlashDrafter
from common.errors import ConfigError


def check_tensors(checkpoint: Path, spec: DrafterSpec) -> None:
    """Raise `ConfigError` that names each tensor which does not fit; no data is read."""
    wrong = _odd_tensors(checkpoint, spec)
    if wrong:
        raise ConfigError(
            f"drafter {str(checkpoint)!r}: {WEIGHTS_FILE} does not fit its {CONFIG_FILE}: "
            f"{'; '.join(wrong)}"
        )


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
