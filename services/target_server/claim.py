"""Which ring of the run a target server has: the lowest that no live one holds.

The claim is a lock in the run directory that ends with the process, so that one that is started
again takes the place of one that died, whoever starts it.
"""

from pathlib import Path

from common.contracts.sequences import Shard
from common.errors import ConfigError
from common.lifecycle import FileLock, claim_lowest, lock_holder


def claim_shard(run_directory: Path, replicas: int, holder: str) -> tuple[Shard, FileLock]:
    """Take a ring of the run, or raise `ConfigError` where each has its target server."""
    paths = [run_directory / f"target-{index}.lock" for index in range(replicas)]
    claimed = claim_lowest(paths, holder)
    if claimed is None:
        pids = ", ".join(str(lock_holder(path)) for path in paths)
        raise ConfigError(
            f"{str(run_directory)!r}: got one more target server than target.replicas = "
            f"{replicas} (they have pid {pids}); raise target.replicas for every service, stop "
            f"one, or choose another run.directory"
        )
    index, lock = claimed
    return Shard(index=index, count=replicas), lock
