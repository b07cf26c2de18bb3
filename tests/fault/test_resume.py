"""A run that is killed at any point and started again ends as one that was not."""

import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.runs import make_run, segments_of
from tests.series import (
    Life,
    account_of,
    curve_of,
    newest_of,
    read_lines,
    state_of,
    weights_of,
)

pytestmark = pytest.mark.timeout(300)
KILLS = 3
NUM_CONVERSATIONS = 150
SETTINGS = {
    # Lines of metrics and checkpoints do not fall together.
    "a step a row": ("training.checkpoint_steps=7", "training.log_steps=3"),
    "steps across rows": (
        "training.checkpoint_steps=7", "training.log_steps=3", "training.visits=3",
        "training.accumulation=2", "optimizer.kind=muon", "drafter.loss=dpace",
    ),
    "several rows a step": (
        "training.checkpoint_steps=5", "training.log_steps=2", "training.accumulation=4",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes a run of a kind that nobody kills, once for all tests."""

    @functools.cache
    def run(kind: str) -> Path:
        directory = tmp_path_factory.mktemp("straight")
        config = make_run(directory, num_conversations=NUM_CONVERSATIONS)
        with Life(config, *SETTINGS[kind]) as life:
            life.wait_for_end()
        return directory / "run"

    return run


def assert_equal(straight: Path, killed: Path) -> None:
    """Weights, moments, figures and the account of rows are the same, bit for bit."""
    expected, got = newest_of(straight), newest_of(killed)
    assert got.name == expected.name
    weights, others = weights_of(expected), weights_of(got)
    assert weights.keys() == others.keys()
    unlike = [name for name, tensor in weights.items() if not torch.equal(tensor, others[name])]
    assert not unlike
    assert state_of(got) == state_of(expected)
    curve = curve_of(straight)
    assert len(curve) > 3
    assert curve_of(killed) == curve


def run_killed(directory: Path, names: tuple[str, ...], settings: tuple[str, ...]) -> Path:
    """Run, with kills of these services: its own lines go on, some more come, and anywhere then."""
    chooser = random.Random(str((names, settings)))
    config = make_run(directory, num_conversations=NUM_CONVERSATIONS)
    run = directory / "run"
    with Life(config, *settings) as life:
        for _ in range(KILLS):
            life.wait_for_lines(len(read_lines(run)) + chooser.randrange(1, 5))
            threading.Event().wait(chooser.uniform(0, 0.05))
            life.kill(*chooser.sample(names, len(names)))
            life.start(*names)
        life.wait_for_end()
    assert not segments_of(directory)
    return run


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_is_killed_at_random_points_ends_bit_equal(
    tmp_path: Path, straight: Callable[[str], Path], kind: str
) -> None:
    killed = run_killed(tmp_path, ("target", "worker"), SETTINGS[kind])
    assert any(line.get("is_resumed") for line in read_lines(killed))
    assert_equal(straight(kind), killed)


@pytest.mark.parametrize("resume_wait", [0.2, 0.0])
def test_a_target_that_is_killed_at_random_points_changes_no_bit(
    tmp_path: Path, straight: Callable[[str], Path], resume_wait: float
) -> None:
    """With no wait it gives rows out before the worker has said which of them it holds."""
    settings = (*SETTINGS["a step a row"], f"ring.resume_wait_seconds={resume_wait}")
    killed = run_killed(tmp_path, ("target",), settings)
    assert_equal(straight("a step a row"), killed)
    account, state = account_of(killed), state_of(newest_of(killed))
    assert account["rows_before"] > 0
    assert account["rows_before"] + account["rows_trained"] == state["trained_rows"]


def test_a_worker_alone_that_is_killed_trains_each_row_once_in_another_order(
    tmp_path: Path,
) -> None:
    """Rows that it lost come behind those that are in the ring by then."""
    run = run_killed(tmp_path, ("worker",), SETTINGS["a step a row"])
    account, state = account_of(run), state_of(newest_of(run))
    total = account["rows_published"]
    assert account["rows_lost"] == account["rows_open"] == 0
    assert account["recaptured"] > 0
    assert state["consumed"] == {"low": total, "above": []}
    assert state["trained_rows"] == total, "none twice on the lineage of these weights"


def test_a_resume_leaves_the_checkpoints_that_are_there_alone(tmp_path: Path) -> None:
    """They are committed: to write one of them again would be to risk its rows."""
    settings = (*SETTINGS["a step a row"], "training.keep_checkpoints=100")
    config = make_run(tmp_path, num_conversations=NUM_CONVERSATIONS)

    def inodes() -> dict[str, int]:
        steps = (tmp_path / "run" / "checkpoints" / "main" / "0").glob("step-*")
        return {path.name: path.stat().st_ino for path in steps}

    with Life(config, *settings) as life:
        life.wait_for_lines(6)
        life.kill("target", "worker")
        before = inodes()
        life.start("target", "worker")
        life.wait_for_end()
    after = inodes()
    assert len(before) > 1
    assert before.items() <= after.items()
    steps = sorted(int(name.removeprefix("step-")) for name in after)
    assert all(step % 7 == 0 for step in steps[:-1]), "at its interval, and at the end"
