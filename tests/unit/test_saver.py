"""One checkpoint at a time beside the training; what fails comes to the main thread."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, DiskFullError
from services.drafter_worker.saver import Save, Saver, on_host

PATH = Path("step-000005")


def save_with(write: Callable[[], Path]) -> Save:
    return Save(5, write, lambda: None)


def test_a_checkpoint_is_taken_once_and_when_it_is_written() -> None:
    saver, is_written = Saver(), threading.Event()

    def write() -> Path:
        assert is_written.wait(60)
        return PATH

    save = save_with(write)
    assert saver.take(waits=True) is None  # there is none
    saver.begin(save)
    assert saver.take() is None
    assert saver.is_busy
    with pytest.raises(RuntimeError, match="step 5 is being written"):
        saver.begin(save)
    is_written.set()
    assert saver.take(waits=True) == (save, PATH)
    assert not saver.is_busy
    assert saver.take() is None


def test_a_full_disk_leaves_the_checkpoint_to_be_written_again() -> None:
    def write() -> Path:
        raise DiskFullError("no space")

    saver, save = Saver(), save_with(write)
    saver.begin(save)
    assert saver.take(waits=True) == (save, None)
    saver.begin(save_with(lambda: PATH))


def test_another_failure_is_raised_where_the_checkpoint_is_taken() -> None:
    def write() -> Path:
        raise CheckpointError("holds NaN")

    saver = Saver()
    saver.begin(save_with(write))
    with pytest.raises(CheckpointError, match="holds NaN"):
        saver.take(waits=True)
    assert not saver.is_busy


def test_copies_on_the_host_are_left_alone_by_later_steps() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "count": torch.tensor(3.0)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copies = on_host(tensors)
    for tensor in tensors.values():
        tensor.add_(1)
    assert all(torch.equal(copies[name], tensor) for name, tensor in before.items())
