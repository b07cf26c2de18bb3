"""Checkpoints that are written while training goes on.

    main thread    copies the state to the host, begins ... takes what is written, in its own time
    saver thread   writes                                   waits for: the disk

One checkpoint at a time. A full disk is the main thread's affair: it writes again, and waits where it must.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.errors import DiskFullError


@dataclass(frozen=True)
class Save:
    """A checkpoint to be written."""

    step: int
    write: Callable[[], Path]
    """Writes it whole and returns its path; leaves nothing where it fails."""
    then: Callable[[], None]
    """What follows once it is durable; the main thread does it."""


class Saver:
    """Writes one checkpoint at a time in a thread of its own; for the main thread."""

    def __init__(self) -> None:
        self._save: Save | None = None
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint was begun and not yet taken."""
        return self._save is not None

    def begin(self, save: Save) -> None:
        """Write from here on; what was begun before must have been taken."""
        if self._save is not None:
            raise RuntimeError(f"step {self._save.step} is being written")
        self._save, self._path, self._failure = save, None, None
        # Not a daemon: a process that ends for another reason still leaves the checkpoint whole.
        self._thread = threading.Thread(target=self._run, args=(save,), name="saver")
        self._thread.start()

    def take(self, *, waits: bool = False) -> tuple[Save, Path | None] | None:
        """Return the checkpoint that was begun, once; None while it is written and where there is none.

        Args:
            waits: until it is written.

        Returns:
            Its path too, or None where the disk was full: it is to be written again.

        Raises:
            CheckpointError: it cannot be written for another reason.
        """
        if self._save is None or (self._thread.is_alive() and not waits):
            return None
        self._thread.join()
        save, self._save = self._save, None
        if self._failure is not None and not isinstance(self._failure, DiskFullError):
            raise self._failure
        return save, self._path

    def _run(self, save: Save) -> None:
        try:
            self._path = save.write()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self._failure = error


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory that later steps leave alone."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
