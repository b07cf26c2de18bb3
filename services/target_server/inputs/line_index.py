"""Where each line of a file begins: found in one scan, kept for the next start.

16 bytes of memory a line while it is built, 8 on disk, mapped when it is used. The index of a
file is found again by its path, size and time of change.
"""

import logging
import os
import time
from pathlib import Path

import numpy as np
import xxhash

_CHUNK_BYTES = 4 << 20
_log = logging.getLogger(__name__)


def line_bounds(path: Path, folder: Path | None) -> np.ndarray:
    """Return [number of lines + 1] int64: line i is bytes [i] to [i + 1], its newline included.

    The index is kept in `folder` where there is one.
    """
    if folder is None:
        return _scan(path)
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    kept = folder / f"{path.name}-{xxhash.xxh3_64_hexdigest(key.encode())}.npy"
    try:
        return np.load(kept, mmap_mode="r")
    except FileNotFoundError:
        pass
    except (ValueError, OSError, EOFError) as error:
        _log.warning("index %s cannot be read and is built again: %s", kept, error)
    start = time.monotonic()
    bounds = _scan(path)
    _log.info("%s: %d lines indexed in %.1f s", path, len(bounds) - 1, time.monotonic() - start)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.save(file, bounds)
    temporary.replace(kept)
    return bounds


def _scan(path: Path) -> np.ndarray:
    chunk = np.empty(_CHUNK_BYTES, dtype=np.uint8)
    found = [np.zeros(1, dtype=np.int64)]
    position = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk.data):
            # +1: a line begins behind the newline of the one before it.
            found.append(np.flatnonzero(chunk[:count] == ord("\n")) + (position + 1))
            position += count
    if found[-1].size == 0 or found[-1][-1] != position:
        found.append(np.full(1, position, dtype=np.int64))
    bounds = np.concatenate(found)
    return bounds if position else bounds[:1]
