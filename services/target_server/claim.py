"""Which ring of the run a target server has: the lowest that no live one holds.

The claim is a lock in the run directory that ends with the process, so that one that is started
again takes the place of one that died, whoever starts it.
"""

from pathlib import Path

from common.contracts.sequences import Shard
from common.errors import ConfigError
from common.lifecycle import FileLock, claim_lowest, describe_holder


def claim_shard(run_directory: Path, replicas: int, holder: str) -> tuple[Shard, FileLock]:
    """Take a ring of the run, or raise `ConfigError` where each has its target server."""
    paths = [run_directory / f"target-{index}.lock" for index in range(replicas)]
    claimed = claim_lowest(paths, holder)
    if claimed is None:
        holders = ", ".join(map(describe_holder, paths))
        raise ConfigError(
            f"target.replicas got {replicas}, and each ring of {str(run_directory)!r} has its target "
            f"server: {holders}; raise target.replicas in every service, stop one, or choose another "
            f"run.directory"
        )
    index, lock = claimed
    return Shard(index=index, count=replicas), lock
