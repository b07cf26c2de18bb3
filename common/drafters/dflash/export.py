"""Copies a checkpoint into a layout that engines load: whole or not at all, and read back."""

import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.drafters.dflash.checkpoint import (
    WEIGHTS_FILE,
    WeightsDtype,
    read_drafter,
    read_spec,
    write_drafter,
)
from common.drafters.dflash.config import DrafterSpec
from common.drafters.dflash.lint import lint
from common.drafters.dflash.speculators import TargetReference, check_layers, write_speculators
from common.errors import CheckpointError, ConfigError
from common.folders import is_disk_full, whole_folder

Layout = Literal["zlab", "speculators"]
_ORIGIN_FILE = "run.json"


def export(
    checkpoint: Path,
    out: Path,
    layout: Layout,
    dtype: WeightsDtype,
    target: TargetReference | None = None,
) -> list[Path]:
    """Write a checkpoint to `out` and return the files.

    Args:
        out: a folder that is not there, or empty.
        target: for the speculators layout, where its readers find embedding and head.

    Raises:
        ConfigError: a drafter that the layout cannot express, or an `out` that is not empty.
        CheckpointError: a checkpoint or copy that cannot be read, written, or served as it is.
    """
    spec = read_spec(checkpoint)
    if layout == "speculators":
        check_layers(spec)
    _check_empty(out)
    state = read_drafter(checkpoint, torch.device("cpu"), torch.float32).state_dict()
    try:
        with whole_folder(out) as folder:
            _write(folder, state, spec, layout, dtype, target)
            if (checkpoint / _ORIGIN_FILE).is_file():
                shutil.copyfile(checkpoint / _ORIGIN_FILE, folder / _ORIGIN_FILE)
            _check_written(folder, state)
    except (OSError, SafetensorError) as error:
        reason = "the disk is full" if is_disk_full(error) else str(error)
        raise CheckpointError(f"export {str(out)!r} cannot be written: {reason}") from error
    return sorted(out.iterdir())


def _write(
    folder: Path,
    state: dict[str, Tensor],
    spec: DrafterSpec,
    layout: Layout,
    dtype: WeightsDtype,
    target: TargetReference | None,
) -> None:
    if layout == "zlab":
        write_drafter(folder, state, spec, dtype)
    elif target is not None:
        write_speculators(folder, state, spec, target, dtype)
    else:
        raise ConfigError("speculators layout: it names the target; give it with --target")


def _check_empty(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"export to {str(out)!r}: got something that is there, expected a folder that is not, "
            f"or that is empty; choose another, or remove it"
        )


def _check_written(folder: Path, state: dict[str, Tensor]) -> None:
    """Read the copy back: the same tensors, and no key that an engine would misread."""
    written = load_file(folder / WEIGHTS_FILE)
    unlike = sorted(set(written) ^ set(state)) + [
        name
        for name in sorted(set(written) & set(state))
        if not torch.equal(written[name], state[name].to(written[name].dtype))
    ]
    if unlike:
        raise CheckpointError(
            f"{str(folder)!r}: tensors read back unlike those written: {', '.join(unlike)}"
        )
    found = lint(folder)
    if found:
        raise CheckpointError(
            f"this drafter would be misread wherever it is served, nothing is written: "
            f"{'; '.join(map(str, found))}"
        )
