"""Finds the checkpoints to evaluate, follows a run for them, refuses those of another target.

<run_dir>/checkpoints/<group>/<index>/step-<number>/    one series a (group, index)
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from common.drafters.dflash.checkpoint import CONFIG_FILE, read_spec
from common.drafters.dflash.config import DrafterSpec
from common.errors import ConfigError
from common.target.loading import TargetDescription

_STEP = re.compile(r"step-(\d+)")
_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


def find_checkpoints(listed: tuple[Path, ...], run_directory: Path) -> list[Path]:
    """Return the listed checkpoints, or the newest of each series of the run."""
    for path in listed:
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(
                f"evaluation.checkpoints: {str(path)!r} has no {CONFIG_FILE}; point it at a "
                f"checkpoint directory, such as .../checkpoints/main/0/step-000200, or at a drafter "
                f"in the z-lab layout"
            )
    newest = {path.parent: path for path in all_checkpoints(run_directory)}
    found = list(listed) or [newest[series] for series in sorted(newest)]
    if not found:
        raise ConfigError(
            f"no checkpoint under {str(run_directory / 'checkpoints')!r}; train first, or name "
            f"one in evaluation.checkpoints"
        )
    return [path.resolve() if path.is_symlink() else path for path in found]


def all_checkpoints(run_directory: Path) -> list[Path]:
    """Return the run's whole checkpoints of this moment, first steps first."""
    found = (run_directory / "checkpoints").glob("*/*/step-*")
    whole = [p for p in found if _STEP.fullmatch(p.name) and (p / CONFIG_FILE).is_file()]
    return sorted(whole, key=lambda path: (step_of(path), path))


def follow_checkpoints(
    run_directory: Path,
    stop: threading.Event,
    newest_first: threading.Event,
    has_ended: Callable[[], bool],
) -> Iterator[Path]:
    """Yield each checkpoint of the run once, as it comes, until no more will, or a stop.

    `newest_first` puts the newest of each series of that moment before older ones, and is cleared.
    """
    seen: set[Path] = set()
    urgent: list[Path] = []
    while not stop.is_set():
        is_last_look = has_ended()  # before the look, or what came in between would be missed
        fresh = [path for path in all_checkpoints(run_directory) if path not in seen]
        if newest_first.is_set():
            newest_first.clear()
            urgent = list({path.parent: path for path in fresh}.values())
            _log.info("asked for the newest checkpoints: %s", urgent or "all are evaluated")
        fresh = [path for path in urgent if path in fresh] or fresh
        if fresh:
            seen.add(fresh[0])
            yield fresh[0]
        elif is_last_look:
            return
        else:
            stop.wait(_LOOK_SECONDS)


def read_fitting_spec(checkpoint: Path, target: TargetDescription) -> DrafterSpec:
    """Return a checkpoint's spec, or raise `ConfigError` where its target has another shape."""
    spec = read_spec(checkpoint)
    if wrong := spec.misfits(target):
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} belongs to another target than {target.model!r}: "
            f"{'; '.join(wrong)}; give the target that it was trained with as target.model"
        )
    _warn_of_other_weights(checkpoint, target)
    return spec


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint; 0 where its name does not say."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def result_name(checkpoint: Path) -> str:
    """Return `<group>-<index>-step-<number>`, or the directory's name outside of a run."""
    parts = checkpoint.absolute().parts
    return "-".join(parts[-3:]) if is_of_a_run(checkpoint) else parts[-1]


def is_of_a_run(checkpoint: Path) -> bool:
    """Say whether a checkpoint lies where a run's series do."""
    parts = checkpoint.absolute().parts
    return len(parts) > 4 and parts[-4] == "checkpoints" and bool(_STEP.fullmatch(parts[-1]))


def _warn_of_other_weights(checkpoint: Path, target: TargetDescription) -> None:
    try:
        run = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not every checkpoint comes from this project
        return
    trained_with = run.get("target_fingerprint") if isinstance(run, dict) else None
    if trained_with not in (None, target.fingerprint):
        _log.warning(
            "checkpoint %s was trained with target %s, this is %s of the same shape: "
            "acceptance is that of this pair",
            checkpoint, trained_with, target.fingerprint,
        )  # fmt: skip
