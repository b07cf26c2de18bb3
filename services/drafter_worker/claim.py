"""Which index of its group a worker has.

Until workers sync, each owns the lowest index that nobody holds, and with it
`checkpoints/<group>/<index>`: by a lock on a file there, which ends with the process.
"""

from pathlib import Path

from common.errors import ConfigError
from common.lifecycle import FileLock, claim_lowest

_MOST_WORKERS = 10_000


def claim_index(group_directory: Path, holder: str) -> tuple[int, FileLock]:
    """Take the lowest index of a group that no live worker holds."""
    paths = (group_directory / str(index) / "owner.lock" for index in range(_MOST_WORKERS))
    claimed = claim_lowest(paths, holder)
    if claimed is None:
        raise ConfigError(f"{str(group_directory)!r}: {_MOST_WORKERS} workers hold every index")
    return claimed
