"""Which prompts went into which row, written before the row is published.

What the target writes is not a function of the data alone, so packing cannot be repeated as it is
for given conversations. The journal names the prompts of each row instead: after a restart a row
is made again from its own prompts, and fresh rows take those that no row has.
"""

import os
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from common.contracts.record import Record
from common.contracts.sequences import Shard
from common.errors import ConfigError
from common.folders import append_whole, cut_torn_line


class Recipe(Record):
    """The prompts of one row, in order."""

    sequence: int
    data_epoch: int
    sample_ids: tuple[int, ...]


class Heading(Record):
    """What the recipes of a journal hold for."""

    fingerprint: str
    """Identity of the prompts, their order and their rendering."""
    shard: Shard
    """The ring whose rows they are, and how many rings share the prompts."""


class RecipeJournal:
    """One ring's append-only JSON lines: a heading, then a recipe each. A context manager."""

    def __init__(self, path: Path, fingerprint: str, shard: Shard) -> None:
        """Raise `ConfigError` where the journal is of other data or rings, or cannot be read."""
        heading = Heading(fingerprint=fingerprint, shard=shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        try:
            cut_torn_line(self._file.fileno())
            self.recipes = _read(path, heading)
        except BaseException:
            self._file.close()
            raise
        if path.stat().st_size == 0:
            self._write(heading.model_dump_json())

    def append(self, recipe: Recipe) -> None:
        """Write a recipe; it outlives this process and the machine."""
        self._write(recipe.model_dump_json())

    def __enter__(self) -> "RecipeJournal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        append_whole(self._file, line.encode() + b"\n")
        os.fsync(self._file.fileno())


def _read(path: Path, heading: Heading) -> list[Recipe]:
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        return []
    try:
        found = Heading.model_validate_json(lines[0])
        recipes = [Recipe.model_validate_json(line) for line in lines[1:]]
    except ValidationError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}; choose another run.directory"
        ) from error
    if found.shard != heading.shard:
        raise ConfigError(
            f"{str(path)!r} is of ring {found.shard}, got ring {heading.shard}: the rings share the "
            f"prompts out among them; set target.replicas={found.shard.count}, or choose another "
            f"run.directory"
        )
    if found != heading:
        raise ConfigError(
            f"{str(path)!r} is of other prompts, settings of [data], chat template or seed (got "
            f"{heading.fingerprint}, expected {found.fingerprint}); set them as they were, or choose "
            f"another run.directory"
        )
    return recipes
