"""A run whose disk is full waits, and ends as one whose disk was not."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.quorum import is_installed
from tests.groups import GroupRun
from tests.rings import wait_until
from tests.runs import make_run
from tests.series import Life, account_of, newest_of, read_lines, state_of, weights_of

pytestmark = pytest.mark.timeout(300)
SETTINGS = (
    "training.checkpoint_steps=5", "training.log_steps=1", "training.keep_checkpoints=2",
    "data.cursor_rows=5",
)  # fmt: skip


@pytest.fixture
def make_small_disk() -> Iterator[Callable[[Path], Path]]:
    """Make file systems of 8 MiB."""
    made: list[Path] = []

    def make(directory: Path) -> Path:
        directory.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("only who may mount can make a small file system (issue 7)")
        made.append(directory)
        return directory

    yield make
    for directory in made:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Take all the space of a file system."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def test_a_run_without_space_waits_and_ends_bit_equal(
    tmp_path: Path, make_small_disk: Callable[[Path], Path]
) -> None:
    small_disk = make_small_disk(tmp_path / "small" / "run")
    straight = make_run(tmp_path / "straight", num_conversations=150).parent / "run"
    with Life(straight.parent / "run.toml", *SETTINGS) as life:
        life.wait_for_end()
    config = make_run(small_disk.parent, num_conversations=150)
    with Life(config, *SETTINGS, logs=tmp_path / "logs") as life:
        life.wait_for_lines(6)
        filler = fill(small_disk)
        wait_until(lambda: "the run waits for space" in life.log(), "the worker waits")
        num_lines = len(read_lines(small_disk))
        checkpoints = sorted(small_disk.glob("checkpoints/main/0/step-*"))
        assert all(state_of(path)["step"] >= 0 for path in checkpoints), "each is whole"
        filler.unlink()
        life.wait_for_lines(num_lines + 1)
        fill(small_disk).unlink()
        life.wait_for_end()
        assert "the disk has space again" in life.log()
        assert "Traceback" not in life.log()
    expected, got = newest_of(straight), newest_of(small_disk)
    weights, others = weights_of(expected), weights_of(got)
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert state_of(got) == state_of(expected)
    steps = [line["step"] for line in read_lines(small_disk)]
    assert steps == list(range(1, state_of(got)["step"] + 1)), "no line is lost or torn"
    assert account_of(small_disk)["rows_lost"] == 0
    assert json.loads((small_disk / "workers" / "main-0.summary.json").read_text())


@pytest.mark.skipif(not is_installed(), reason="torchft (extra sync) is not installed")
def test_a_group_without_space_for_its_checkpoint_goes_on_when_there_is_some(
    tmp_path: Path, make_small_disk: Callable[[Path], Path]
) -> None:
    disk = make_small_disk(tmp_path / "run" / "checkpoints")
    with GroupRun(tmp_path, "allreduce") as run:
        run.start_workers("a", "b", settings=("training.checkpoint_steps=4",))
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        filler = fill(disk)
        run.wait_until(
            lambda: "the run waits for space" in run.log("a") + run.log("b"), "the group waits"
        )
        threading.Event().wait(3.0)  # longer than a lease
        filler.unlink()
        run.wait_for_end("a", "b")
        run.assert_whole("a", "b")
