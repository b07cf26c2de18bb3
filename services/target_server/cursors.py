"""Where the stream of rows was: small files from which it goes on without packing again.

A cursor holds what the next row depends on: the place in the data epoch, the samples in open rows
by their ids, and the counts of what was skipped. It is for one packing alone, named by its
fingerprint. Cursors are saved every few hundred rows; those that no resume can need are deleted.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from common.contracts.record import Record
from common.errors import ConfigError
from common.folders import is_disk_full
from common.lifecycle import write_atomically
from services.target_server.counts import SkipCounts

_FILE_NAME = "{:012}.json"
_log = logging.getLogger(__name__)


class Cursor(Record):
    """The state before row `sequence` is packed."""

    fingerprint: str
    """Identity of the data, the order, the packing and the rendering."""
    sequence: int
    data_epoch: int
    positions: tuple[int, ...]
    """Rows that each source has given in this data epoch; empty at its start."""
    num_parts: int
    """Samples that were taken of the row that comes next."""
    open_rows: tuple[tuple[tuple[int, int], ...], ...]
    """(sample id, part) of the samples in each open row, in order."""
    skipped: SkipCounts
    noted: SkipCounts
    num_cut_answers: int


class Cursors:
    """The saved cursors of one target server, one file each in a folder of its own.

    All targets of a run pack the same rows, so that one goes on from what another saved: a run
    resumes with another number of targets.
    """

    def __init__(self, folder: Path, settled_below: Callable[[], int]) -> None:
        self._folder = folder
        self._settled_below = settled_below

    def save(self, cursor: Cursor) -> None:
        """Keep a cursor, and of those at or before the first row that may come again the last.

        A full disk costs this one alone: a resume packs more rows again.
        """
        path = self._path(cursor.sequence)
        try:
            write_atomically(path, cursor.model_dump_json())
        except OSError as error:
            if not is_disk_full(error):
                raise
            _log.warning("cursor %s is not saved: the disk is full", path)
            return
        needed = self._settled_below()
        for sequence in [s for s in self._sequences() if s <= needed][:-1]:
            self._path(sequence).unlink(missing_ok=True)

    def newest(self, sequence: int, fingerprint: str) -> Cursor | None:
        """Return the last cursor at or before a row, or None where none can be read.

        Raises:
            ConfigError: it was saved by a run with other data.
        """
        for saved in self._sequences():
            # From the first row on nothing holds: the directory may have had other data.
            if saved > sequence or not sequence:
                self._path(saved).unlink(missing_ok=True)
        mine = _newest_in(self._folder, sequence)
        if mine is not None and mine.fingerprint != fingerprint:
            raise ConfigError(
                f"cursor {str(self._path(mine.sequence))!r} is of data {mine.fingerprint}, got "
                f"{fingerprint}: the run packed other files, or packed them otherwise; restore "
                f"[data], run.seed and the chat template, or choose another run.directory"
            )
        folders = self._folder.parent.iterdir() if sequence else ()
        found = [mine, *(_newest_in(folder, sequence) for folder in folders)]
        fitting = [cursor for cursor in found if cursor and cursor.fingerprint == fingerprint]
        return max(fitting, key=lambda cursor: cursor.sequence, default=None)

    def _sequences(self) -> list[int]:
        return _sequences_in(self._folder)

    def _path(self, sequence: int) -> Path:
        return self._folder / _FILE_NAME.format(sequence)


def _newest_in(folder: Path, sequence: int) -> Cursor | None:
    """Return the last cursor at or before a row that can be read."""
    for saved in reversed(_sequences_in(folder)):
        path = folder / _FILE_NAME.format(saved)
        try:
            cursor = Cursor.model_validate_json(path.read_bytes()) if saved <= sequence else None
        except (OSError, ValidationError) as error:
            _log.warning("cursor %s cannot be read and is passed over: %s", path, error)
            continue
        if cursor is not None:
            return cursor
    return None


def _sequences_in(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("[0-9]*.json"))
