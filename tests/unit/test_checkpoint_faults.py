"""Checkpoints that are cut off, of another drafter, or without space: named, and nothing is touched."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.loading import load
from common.config.shared import RunTable
from common.contracts.sequences import SequenceSet
from common.disk import write_with_patience
from common.drafters.dflash.checkpoint import write_drafter
from common.errors import ConfigError, DiskFullError
from common.folders import append_whole
from services.drafter_worker.assemble import open_store
from services.drafter_worker.build import build_trainee
from services.drafter_worker.checkpoint import CheckpointStore, TrainerState
from services.drafter_worker.config import WorkerConfig
from services.target_server.assemble import committed_rows
from services.target_server.counts import SkipCounts
from services.target_server.cursors import Cursor, Cursors
from tests.targets import make_tiny_target

CONSUMED = SequenceSet(low=7, above=(9,))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "target")


def config_for(target: Path, *settings: str) -> WorkerConfig:
    options = [
        f"target.model={target}", "target.num_aux_layers=2", "drafter.num_layers=1",
        "drafter.block_size=4", "drafter.num_anchors=16", *settings,
    ]  # fmt: skip
    return load(WorkerConfig, [], options, {})


def state_at(step: int) -> TrainerState:
    return TrainerState(
        step=step, trained_rows=step, trained_tokens=0, consumed=CONSUMED, sums=(0.1, 1 / 3)
    )


def save(store: CheckpointStore, target: Path, step: int) -> Path:
    trainee = build_trainee(config_for(target), store)
    names = dict(trainee.drafter.named_parameters())
    masters = dict(zip(names, trainee.optimizer.masters, strict=True))
    return store.save(
        lambda folder: write_drafter(folder, masters, trainee.spec),
        trainee.optimizer.state(), state_at(step), {"template_fingerprint": "t"},
    )  # fmt: skip


def refusal(directory: Path, target: Path, *settings: str) -> str:
    before = contents(directory)
    with pytest.raises(ConfigError) as caught:
        build_trainee(config_for(target, *settings), CheckpointStore(directory, 2))
    assert contents(directory) == before, "nothing is overwritten"
    return str(caught.value)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path, target: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    save(store, target, 5)
    trainee = build_trainee(config_for(target), store)
    assert (trainee.progress.step, trainee.consumed) == (5, CONSUMED)
    assert trainee.sums == state_at(5).sums
    assert trainee.template_fingerprint == "t"
    assert trainee.is_resumed


@pytest.mark.parametrize("name", ["step-000005-good", "step-000009.bak", "step-notes"])
def test_a_copy_under_another_name_is_no_checkpoint_and_stays(
    tmp_path: Path, target: Path, name: str
) -> None:
    series = tmp_path / "checkpoints" / "main" / "0"
    store = CheckpointStore(series, 1)
    shutil.copytree(save(store, target, 5), series / name)
    assert store.newest() == series / "step-000005"
    save(store, target, 6)
    assert sorted(path.name for path in series.iterdir()) == sorted([name, "step-000006"])
    assert committed_rows(RunTable(directory=tmp_path), "main") == CONSUMED


def test_drafters_of_their_own_beside_that_of_a_synced_group_are_refused(
    tmp_path: Path, target: Path
) -> None:
    """Rows that only those have would count as trained."""
    first, second = (tmp_path / "checkpoints" / "main" / index for index in "01")
    CheckpointStore(second, 2)
    settings = [f"run.directory={tmp_path}", "groups.main.sync=allreduce"]
    save(open_store(config_for(target, *settings), 1), target, 5)
    save(CheckpointStore(second, 2), target, 5)
    before = contents(tmp_path)
    with pytest.raises(
        ConfigError, match=r"main/1 beside '.*main/0'.*another run.directory, where"
    ):
        open_store(config_for(target, *settings), 0)
    open_store(config_for(target, settings[0]), 1)
    assert contents(tmp_path) == before
    assert first.is_dir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        del content[key]
        path.write_text(json.dumps(content))

    return change


def with_value(key: str, value: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def with_tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path) | {name: value}, path)


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("config.json", Path.unlink, "config.json"),
        ("config.json", cut, "config.json"),
        ("model.safetensors", Path.unlink, "model.safetensors"),
        ("model.safetensors", cut, "model.safetensors"),
        ("run.json", Path.unlink, "run.json cannot be read"),
        ("run.json", cut, "run.json cannot be read"),
        ("trainer/state.json", Path.unlink, "trainer state cannot be read"),
        ("trainer/state.json", cut, "trainer state cannot be read"),
        ("trainer/state.json", without("consumed"), "consumed"),
        ("trainer/state.json", with_value("consumed", {"low": -1, "above": []}), "consumed"),
        ("trainer/state.json", with_value("step", "five"), "step"),
        ("trainer/state.json", with_value("step", -5), "step"),
        ("trainer/state.json", with_value("trained_rows", 1.5), "trained_rows"),
        ("trainer/state.json", with_value("sums", [float("inf")]), "sums"),
        ("trainer/optimizer.safetensors", Path.unlink, "trainer state cannot be read"),
        ("trainer/optimizer.safetensors", cut, "trainer state cannot be read"),
        ("trainer/optimizer.safetensors", with_tensor("0.master", torch.ones(3)), "0.master got (3,)"),
        ("trainer/optimizer.safetensors", with_tensor("9.other", torch.ones(3)), "9.other"),
    ],
)  # fmt: skip
def test_a_partial_checkpoint_is_named_with_the_way_out(
    tmp_path: Path, target: Path, file: str, damage: Callable[[Path], None], words: str
) -> None:
    path = save(CheckpointStore(tmp_path, 2), target, 5)
    damage(path / file)
    message = refusal(tmp_path, target)
    assert words in message, message
    assert str(path) in message
    assert "remove that directory to go on from the one before it" in message


def test_a_checkpoint_of_another_shape_is_named_field_by_field(
    tmp_path: Path, target: Path
) -> None:
    path = save(CheckpointStore(tmp_path, 2), target, 5)
    message = refusal(
        tmp_path, target, "drafter.block_size=8", "drafter.num_layers=2",
        "target.target_layer_ids=[0, 2]", "target.mask_token_id=290",
    )  # fmt: skip
    for words in (
        str(path), "num_layers: 1 and 2", "block_size: 4 and 8", "mask_token_id: 280 and 290",
        "target_layer_ids: (1, 3) and (0, 2)", "choose another run.directory",
    ):  # fmt: skip
        assert words in message, message


def test_a_checkpoint_of_another_optimizer_is_named(tmp_path: Path, target: Path) -> None:
    path = save(CheckpointStore(tmp_path, 2), target, 5)
    message = refusal(tmp_path, target, "optimizer.kind=muon")
    assert "set the old optimizer.kind" in message
    assert str(path) in message


@pytest.mark.parametrize("writer", ["", ".999999999"])
def test_a_replacement_that_was_cut_off_leaves_a_whole_checkpoint(
    tmp_path: Path, target: Path, writer: str
) -> None:
    """A kill between the two renames: committed rows are in no other checkpoint."""
    is_shared = bool(writer)
    path = save(CheckpointStore(tmp_path, 2, is_shared=is_shared), target, 5)
    before = contents(path)
    path.rename(tmp_path / f".replaced-{path.name}{writer}")
    store = CheckpointStore(tmp_path, 2, is_shared=is_shared)
    assert store.newest() == path
    assert contents(path) == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_was_replaced_goes_where_its_successor_has_arrived(
    tmp_path: Path, target: Path
) -> None:
    path = save(CheckpointStore(tmp_path, 2), target, 5)
    (tmp_path / f".replaced-{path.name}").mkdir()
    CheckpointStore(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_step_that_is_saved_again_takes_the_place_of_the_old_one(
    tmp_path: Path, target: Path
) -> None:
    store = CheckpointStore(tmp_path, 2)
    path = save(store, target, 5)
    (path / "mark").touch()
    assert save(store, target, 5) == path
    assert not (path / "mark").exists()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def write_to_full_disk(folder: Path) -> None:
    """Have the kernel refuse a write for lack of space."""
    with Path("/dev/full").open("wb", buffering=0) as device:
        device.write(b"weights")


def test_without_space_the_worker_waits_and_then_goes_on(tmp_path: Path, target: Path) -> None:
    store, stop, reasons = CheckpointStore(tmp_path, 2), threading.Event(), []
    first = save(store, target, 5)
    before = contents(first)
    is_full = [True, True, False]

    def write_model(folder: Path) -> None:
        if is_full.pop(0):
            write_to_full_disk(folder)

    def write() -> Path:
        return store.save(write_model, {}, state_at(6), {})

    path = write_with_patience(write, stop, reasons.append, retry_seconds=0.01)
    assert path.name == "step-000006"
    assert len(reasons) == 2
    assert "step-000006" in reasons[0]
    assert "the disk is full" in reasons[0]
    assert contents(first) == before


def test_a_stop_ends_the_wait_for_space(tmp_path: Path, target: Path) -> None:
    store, stop = CheckpointStore(tmp_path, 2), threading.Event()
    save(store, target, 5)
    stop.set()
    with pytest.raises(DiskFullError, match="free space, older checkpoints are untouched"):
        write_with_patience(lambda: store.save(write_to_full_disk, {}, state_at(6), {}), stop)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_other_errors_are_not_waited_for() -> None:
    def write() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        write_with_patience(write, threading.Event())


def test_a_cursor_without_space_is_left_out(tmp_path: Path, caplog: Any) -> None:
    cursors = Cursors(tmp_path / "target-0", lambda: 0)
    cursor = Cursor(
        fingerprint="f", sequence=0, data_epoch=0, positions=(), num_parts=0, open_rows=(),
        skipped=SkipCounts(), noted=SkipCounts(), num_cut_answers=0,
    )  # fmt: skip
    cursors.save(cursor)
    written_as = tmp_path / "target-0" / f".{5:012}.json.{os.getpid()}"
    written_as.symlink_to("/dev/full")
    cursors.save(cursor.model_copy(update={"sequence": 5}))
    assert "is not saved: the disk is full" in caplog.text
    assert [path.name for path in (tmp_path / "target-0").iterdir()] == [f"{0:012}.json"]
    assert cursors.newest(9, "f") == cursor


def test_a_line_is_whole_or_not_there(tmp_path: Path) -> None:
    class Half:
        """A file whose disk is full behind its tenth byte."""

        def __init__(self, path: Path) -> None:
            self._file = path.open("a+b", buffering=0)
            self.fileno, self.close = self._file.fileno, self._file.close

        def write(self, content: bytes) -> int:
            room = 10 - self._file.tell()
            if room <= 0:
                write_to_full_disk(tmp_path)
            return self._file.write(content[:room])

    half = Half(tmp_path / "lines")
    append_whole(half, b"first\n")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left"):
        append_whole(half, b"second\n")  # type: ignore[arg-type]
    half.close()
    assert (tmp_path / "lines").read_bytes() == b"first\n"
