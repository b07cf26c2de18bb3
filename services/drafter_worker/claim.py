"""Which index of its group a worker has.

Until workers sync, each owns the lowest index that nobody holds, and with it
`checkpoints/<group>/<index>`: by a lock on a file there, which ends with the process.
"""

from pathlib import Path

from common.errors import ConfigError
from common.lifecycle import FileLock


def claim_index(group_directory: Path, holder: str) -> tuple[int, FileLock]:
    """Take the lowest index of a group that no live worker holds."""
    index = 0
    while True:
        lock = FileLock(group_directory / str(index) / "owner.lock", holder)
        try:
            return index, lock.acquire("it belongs to another worker")
        except ConfigError:
            index += 1
