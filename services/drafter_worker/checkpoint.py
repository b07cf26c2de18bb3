"""Checkpoints of one worker: servable at the top, the trainer's state beside it, never half there.

    checkpoints/<group>/<index>/step-000200/   config.json  model.safetensors      (z-lab layout)
                                               run.json                            (where it is from)
                                               trainer/state.json  trainer/optimizer.safetensors

Written under a temporary name, fsynced, renamed. Weights and the rows in them are one such folder (R8).
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.contracts.record import Record
from common.contracts.ring_messages import Count
from common.contracts.sequences import SequenceSet
from common.errors import CheckpointError, ConfigError, DiskFullError
from common.folders import (
    REPLACED,
    UNFINISHED,
    is_disk_full,
    restore_replaced,
    step_folders,
    step_of,
    whole_folder,
)


class TrainerState(Record):
    """trainer/state.json: where training was, and which rows the weights contain."""

    step: Count
    trained_rows: Count
    trained_tokens: Count
    consumed: SequenceSet
    sums: tuple[FiniteFloat, ...] = ()
    """Packed sums since the last line of metrics; float32 values, which JSON holds exactly."""


class CheckpointStore:
    """One worker's series of checkpoints; the first, the newest `keep` and the `best` stay."""

    def __init__(self, directory: Path, keep: int, *, is_shared: bool = False) -> None:
        """Open the series; `is_shared`: the workers of a group have it together, one writes at a time."""
        self._directory = directory
        self._keep = keep
        # A stopped writer may go on where another one has begun: each has its own temporary name.
        self._writer = f".{os.getpid()}" if is_shared else ""
        directory.mkdir(parents=True, exist_ok=True)
        self._restore_replaced()
        if not is_shared:
            self._remove_leftovers()

    def save(
        self,
        write_model: Callable[[Path], object],
        optimizer: dict[str, Tensor],
        state: TrainerState,
        run: dict[str, Any],
    ) -> Path:
        """Write the checkpoint of `state.step` and return its path.

        Args:
            write_model: writes the servable files into the directory that it is given.
            run: JSON of where the checkpoint is from.

        Raises:
            DiskFullError: there is no space; nothing of it is left, and no other is touched.
            CheckpointError: it cannot be written for another reason, with the same effect.
        """
        final = self._directory / f"step-{state.step:06d}"
        try:
            if self._writer:
                self._remove_leftovers()
            with whole_folder(final, replace=True, writer=self._writer) as temporary:
                write_model(temporary)
                _write_trainer(temporary / "trainer", optimizer, state)
                _write_json(temporary / "run.json", run)
        except (OSError, SafetensorError) as error:
            if is_disk_full(error):
                raise DiskFullError(
                    f"checkpoint {str(final)!r}: the disk is full; free space, older checkpoints are "
                    f"untouched"
                ) from error
            raise CheckpointError(
                f"checkpoint {str(final)!r} cannot be written: {error}"
            ) from error
        self._prune()
        return final

    def newest_step(self) -> int:
        """Return the step of the newest whole checkpoint, -1 without one; bring back a cut-off one."""
        self._restore_replaced()
        newest = self.newest()
        return step_of(newest) if newest is not None else -1

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        steps = step_folders(self._directory)
        return steps[-1] if steps else None

    def _remove_leftovers(self) -> None:
        for leftover in self._directory.glob(f"{UNFINISHED}*"):
            if not self._is_of_a_live_writer(leftover):
                shutil.rmtree(leftover, ignore_errors=bool(self._writer))

    def _restore_replaced(self) -> None:
        for aside in self._directory.glob(f"{REPLACED}*"):
            if not self._is_of_a_live_writer(aside):
                name = aside.name.removeprefix(REPLACED).partition(".")[0]
                restore_replaced(aside, self._directory / name)

    def _is_of_a_live_writer(self, leftover: Path) -> bool:
        return bool(self._writer) and is_alive(leftover.suffix.removeprefix("."))

    def _prune(self) -> None:
        steps = step_folders(self._directory)
        first = steps[:1] if steps and steps[0].name.endswith("000000") else []
        best = (self._directory / "best").resolve()  # a link that the evaluator keeps
        for old in steps[len(first) : -self._keep]:
            if old.resolve() != best:
                shutil.rmtree(old)


def refuse_other_series(series: Path) -> None:
    """Raise `ConfigError` where the group's workers have trained drafters of their own.

    Rows that only those have would count as rows of the one drafter which goes on, and do so in its
    own checkpoint already: what all workers have settled is below its `low`.
    """
    others = [str(path) for path in sorted(series.parent.glob("*")) if step_folders(path)]
    if unlike := [path for path in others if path != str(series)]:
        raise ConfigError(
            f"checkpoints of a group with sync: got {', '.join(unlike)} beside {str(series)!r}, "
            f"expected that one alone, since the rows that the others list are not in its weights; "
            f"set groups.<name>.sync to 'none' as it was, or choose another run.directory, where "
            f"drafter.init_from starts with the weights of one of them"
        )


def read_trainer(checkpoint: Path) -> tuple[dict[str, Tensor], TrainerState]:
    """Return a checkpoint's optimizer tensors and state."""
    try:
        tensors = load_file(checkpoint / "trainer" / "optimizer.safetensors")
        content = (checkpoint / "trainer" / "state.json").read_text(encoding="utf-8")
        state = TrainerState.model_validate_json(content)
    except (OSError, ValueError, ValidationError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {str(checkpoint)!r}: trainer state cannot be read: {error}"
        ) from error
    return tensors, state


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Return run.json: where a checkpoint is from."""
    try:
        content = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {str(checkpoint)!r}: run.json cannot be read: {error}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {str(checkpoint)!r}: run.json is not an object")
    return content


def _write_trainer(directory: Path, optimizer: dict[str, Tensor], state: TrainerState) -> None:
    directory.mkdir()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.items()}
    save_file(tensors, directory / "optimizer.safetensors")
    _write_json(directory / "state.json", state.model_dump(mode="json"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def is_alive(pid: str) -> bool:
    """Whether a process of this number runs."""
    return pid.isdecimal() and Path(f"/proc/{pid}").exists()
