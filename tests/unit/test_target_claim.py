"""Which ring a target server claims, across processes that live and die."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.contracts.sequences import Shard
from common.errors import ConfigError
from services.target_server.claim import claim_shard

HOLDER = """
import sys
from pathlib import Path
from services.target_server.claim import claim_shard
shard, lock = claim_shard(Path(sys.argv[1]), int(sys.argv[2]), "a target")
print(shard.index, flush=True)
sys.stdin.read()
"""


def start(directory: Path, replicas: int) -> tuple[subprocess.Popen[str], int]:
    """Start a process that holds a claim until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), str(replicas)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, int(process.stdout.readline())


def test_each_target_claims_the_lowest_free_ring_and_a_dead_one_s_is_claimed_again(
    tmp_path: Path,
) -> None:
    started = [start(tmp_path, 3) for _ in range(3)]
    assert [index for _, index in started] == [0, 1, 2]
    started[1][0].kill()
    started[1][0].wait(60)
    again = start(tmp_path, 3)
    assert again[1] == 1
    for process, _ in (*started, again):
        process.kill()
        process.communicate()


def test_one_target_server_too_many_is_an_error_that_names_setting_and_holders(
    tmp_path: Path,
) -> None:
    first, lock = claim_shard(tmp_path, 2, "a target")
    other, _ = start(tmp_path, 2)
    assert first == Shard(index=0, count=2)
    with (
        lock,
        pytest.raises(ConfigError, match=r"target.replicas got 2, .*raise target.replicas") as e,
    ):
        claim_shard(tmp_path, 2, "one too many")
    assert str(other.pid) in str(e.value)
    other.kill()
    other.communicate()


def test_a_directory_that_cannot_be_written_is_an_error_and_no_endless_search(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"choose a run\.directory"):
        claim_shard(tmp_path / "run", 2, "a target")
