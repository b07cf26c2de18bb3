"""Files of rows. None is loaded: one row is held at a time.

`JsonLines` and `TableRows` read any row by its number. `CompressedLines` can only be read from
its start. A row that cannot be had (a line beyond all measure, a broken archive) is a rejection
in its place, so that it is counted like any other.
"""

import gzip
import io
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from common.errors import ConfigError, RowRejectedError
from services.target_server.inputs.line_index import line_bounds

RawRow = bytes | dict[str, Any] | RowRejectedError
LONGEST_LINE_BYTES = 64 << 20
_WHOLE_BYTES = 64 << 20
# So many take 0.35 s of a file of 1.2 GB that is not in the page cache, 0.01 s where it is.
_NUM_PIECES, _PIECE_BYTES = 2048, 16 << 10
_INFLATION = 4
_BYTES_A_ROW = 2000
_LINES, _ARCHIVES, _TABLES = (".jsonl", ".ndjson"), (".gz", ".zst"), (".parquet",)


class JsonLines:
    """A plain .jsonl file, by an index of its lines."""

    def __init__(self, path: Path, index_folder: Path | None, limit: int) -> None:
        self.path = path
        self.num_bytes = path.stat().st_size
        self._bounds = line_bounds(path, index_folder)
        self._num_rows = _limited(len(self._bounds) - 1, limit)
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def fingerprint(self) -> tuple[int, str]:
        """Return what tells another file."""
        return _identity(self.path)

    def __len__(self) -> int:
        """Return the number of lines, usable or not."""
        return self._num_rows

    def read(self, number: int) -> RawRow:
        """Return a line."""
        start, stop = self._bounds[number : number + 2].tolist()
        if stop - start > LONGEST_LINE_BYTES:
            return _endless_line()
        return os.pread(self._fd, stop - start, start)

    def read_all(self, numbers: Iterable[int]) -> dict[int, RawRow]:
        """Return several lines by their numbers."""
        return {number: self.read(number) for number in numbers}


class CompressedLines:
    """A .jsonl.gz or .jsonl.zst file."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.num_bytes = path.stat().st_size * _INFLATION
        self.expected_rows = _limited(max(1, self.num_bytes // _BYTES_A_ROW), limit)
        """A guess, which sets how densely its rows are mixed with those of other files."""
        self._limit = limit

    def fingerprint(self) -> tuple[int, str]:
        """Return what tells another file."""
        return _identity(self.path)

    def stream(self) -> Iterator[tuple[int, RawRow]]:
        """Yield number and line from the start of the file."""
        opened, errors = _decompressed(self.path)
        with opened as file:
            for number, line in enumerate(_lines(file, errors)):
                if self._limit and number >= self._limit:
                    return
                yield number, line

    def read_all(self, numbers: Iterable[int]) -> dict[int, RawRow]:
        """Return several lines by their numbers, in one pass up to the last of them."""
        wanted = set(numbers)
        found: dict[int, RawRow] = {}
        for number, line in self.stream() if wanted else ():
            if number in wanted:
                found[number] = line
            if len(found) == len(wanted):
                break
        return found


class TableRows:
    """A Parquet file or a folder that the `datasets` library reads."""

    def __init__(self, path: Path, cache_folder: Path | None, limit: int) -> None:
        self.path = path
        self._rows = _dataset(path, cache_folder)
        self.num_bytes = int(self._rows.data.nbytes)
        self._num_rows = _limited(len(self._rows), limit)

    def fingerprint(self) -> tuple[int, str]:
        """Return what tells other rows: number, columns, and what their files hold."""
        mapped = sorted(Path(entry["filename"]) for entry in self._rows.cache_files)
        parts = [_identity(file) for file in ([self.path] if self.path.is_file() else mapped)]
        return self.num_bytes, f"{len(self._rows)} {self._rows.features} {parts or self._rows[:]}"

    def __len__(self) -> int:
        """Return the number of rows, usable or not."""
        return self._num_rows

    def read(self, number: int) -> RawRow:
        """Return a row as a dict."""
        row: dict[str, Any] = self._rows[number]
        return row

    def read_all(self, numbers: Iterable[int]) -> dict[int, RawRow]:
        """Return several rows by their numbers."""
        return {number: self.read(number) for number in numbers}


Reader = JsonLines | CompressedLines | TableRows


def open_reader(path: Path, index_folder: Path | None, limit: int) -> Reader:
    """Open what `path` is; `limit` takes its first rows alone, 0 all."""
    if path.is_dir() or path.suffix in _TABLES:
        return TableRows(path, index_folder, limit)
    if path.suffix in _ARCHIVES:
        return CompressedLines(path, limit)
    if path.suffix == ".json":
        raise ConfigError(
            f"data: {str(path)!r} ends in .json; expected one JSON object a line in a .jsonl file"
        )
    return JsonLines(path, index_folder, limit)


def _identity(path: Path) -> tuple[int, str]:
    """Return size and a hash: of all bytes, or of pieces all over a large file."""
    size, digest = path.stat().st_size, xxhash.xxh3_64()
    step = size // _NUM_PIECES if size > _WHOLE_BYTES else _PIECE_BYTES
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_PIECE_BYTES))
    return size, digest.hexdigest()


def _limited(count: int, limit: int) -> int:
    return min(count, limit) if limit else count


def _endless_line() -> RowRejectedError:
    return RowRejectedError("too_long", f"a line of more than {LONGEST_LINE_BYTES} bytes")


def _decompressed(path: Path) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """Open an archive; return the file and what it raises where it is broken."""
    if path.suffix == ".gz":
        unzipped = gzip.open(path, "rb")  # noqa: SIM115
        return io.BufferedReader(unzipped), (OSError, EOFError, zlib.error)
    try:
        import zstandard
    except ImportError as error:
        raise _missing("zstandard", path) from error
    return io.BufferedReader(zstandard.open(path, "rb")), (OSError, zstandard.ZstdError)


def _lines(file: IO[bytes], errors: tuple[type[Exception], ...]) -> Iterator[RawRow]:
    """Yield lines; one without end is skipped without being held, a broken archive ends them."""
    while True:
        try:
            line = file.readline(LONGEST_LINE_BYTES + 1)
            is_endless = len(line) > LONGEST_LINE_BYTES
            while is_endless and line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE_BYTES)
        except errors as error:
            yield RowRejectedError("broken_file", f"what follows cannot be read: {error}")
            return
        if not is_endless and not line:
            return
        yield _endless_line() if is_endless else line


def _dataset(path: Path, cache_folder: Path | None) -> Any:
    """Return a `datasets.Dataset`, mapped from disk."""
    try:
        import datasets
    except ImportError as error:
        raise _missing("datasets", path) from error
    datasets.disable_progress_bars()
    cache = str(cache_folder) if cache_folder else None
    try:
        if path.is_file():
            found = datasets.load_dataset("parquet", data_files=str(path), cache_dir=cache)
        elif any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), cache_dir=cache)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"data: {str(path)!r} cannot be read as a dataset: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found and len(found) != 1:
            raise ConfigError(
                f"data: {str(path)!r} has splits {', '.join(found)}; expected one, or one called "
                f"train; save the one you mean as a dataset of its own"
            )
        found = found["train"] if "train" in found else next(iter(found.values()))
    return found


def _missing(package: str, path: Path) -> ConfigError:
    return ConfigError(
        f"data: {str(path)!r} needs the package {package}, which is not installed; "
        f"pip install 'ringdraft[data]'"
    )
