"""Schedule, optimizer and checkpoints of the drafter worker."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from common.contracts.sequences import SequenceSet
from common.errors import CheckpointError, ConfigError
from services.drafter_worker.checkpoint import CheckpointStore, read_trainer
from services.drafter_worker.claim import claim_index
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.optim import MasterAdamW
from services.drafter_worker.schedule import Schedule, StreamPosition


def make_optimizer(**changes: float) -> tuple[nn.Linear, MasterAdamW]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)
    masters = [p.detach().clone() for p in layer.parameters()]
    optimizer = MasterAdamW(layer.parameters(), masters, OptimizerTable(**changes))
    optimizer.learning_rate.fill_(0.1)
    return layer, optimizer


def backward(layer: nn.Linear, optimizer: MasterAdamW, scale: float = 1.0) -> None:
    optimizer.backward((layer(torch.ones(2, 4)) * scale).pow(2).sum())


def test_a_step_equals_torchs_adamw_on_the_mean_gradient() -> None:
    layer, optimizer = make_optimizer(max_gradient_norm=1e9, weight_decay=0.01)
    reference = nn.Parameter(layer.weight.detach().clone())
    expected = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        backward(layer, optimizer)
        optimizer.update(torch.tensor(5.0))
        expected.zero_grad()
        ((torch.ones(2, 4) @ reference.T).pow(2).sum() / 5.0).backward()
        expected.step()
        torch.testing.assert_close(layer.weight.detach(), reference.detach())


def test_the_clip_is_of_the_mean_gradient() -> None:
    layer, optimizer = make_optimizer(max_gradient_norm=1.0)
    backward(layer, optimizer)
    summed = torch.linalg.vector_norm(layer.weight.grad).item()
    optimizer.update(torch.tensor(4.0))
    assert optimizer.gradient_norm.item() == pytest.approx(summed / 4.0)


@pytest.mark.parametrize("weight_sum", [0.0, 1.0])
def test_a_step_without_weight_or_with_nan_changes_nothing(weight_sum: float) -> None:
    layer, optimizer = make_optimizer()
    backward(layer, optimizer)
    optimizer.update(torch.tensor(1.0))
    before = {name: value.clone() for name, value in optimizer.state().items()}
    backward(layer, optimizer, scale=1.0 if weight_sum == 0 else float("nan"))
    optimizer.update(torch.tensor(weight_sum))
    for name, value in optimizer.state().items():
        assert torch.equal(value, before[name]), name
    assert optimizer.num_skipped.item() == 1


def test_optimizer_state_survives_a_round_trip_bit_for_bit() -> None:
    layer, optimizer = make_optimizer()
    backward(layer, optimizer)
    optimizer.update(torch.tensor(1.0))
    saved = {name: value.clone() for name, value in optimizer.state().items()}
    other_layer, other = make_optimizer()
    other.load_state(saved)
    for one, two in ((layer, optimizer), (other_layer, other)):
        backward(one, two)
        two.update(torch.tensor(1.0))
    assert torch.equal(layer.weight, other_layer.weight)


def test_schedule_warms_up_then_falls_to_zero_by_steps_or_by_the_stream() -> None:
    table = OptimizerTable(learning_rate=1.0, schedule_steps=100, warmup_ratio=0.1)
    by_steps = Schedule(table, total_rows=None)
    assert by_steps.at(0, 0) == pytest.approx(0.1)
    assert by_steps.at(9, 0) == pytest.approx(1.0)
    assert by_steps.at(54, 0) == pytest.approx(0.5)
    assert by_steps.at(99, 0) == pytest.approx(0.0)
    by_stream = Schedule(table.model_copy(update={"schedule_steps": 0}), total_rows=100)
    assert by_stream.at(0, 55) == by_steps.at(54, 0)
    assert Schedule(OptimizerTable(learning_rate=1.0), None).at(7, 7) == 1.0


def test_the_stream_s_position_is_that_of_all_rings_and_never_falls_back() -> None:
    position = StreamPosition(2, SequenceSet())
    seen = []
    for sequence in (0, 2, 4, 1, 2, 6, 3):  # ring 0 is ahead of ring 1, and row 2 comes again
        position.reach(sequence)
        seen.append(position.num_rows)
    assert seen == [1, 2, 3, 4, 4, 5, 6]


def test_a_single_ring_s_position_is_its_furthest_row() -> None:
    position = StreamPosition(1, SequenceSet())
    position.reach(41)
    assert position.num_rows == 42


def test_a_resumed_worker_s_position_is_that_of_its_checkpoint() -> None:
    position = StreamPosition(2, SequenceSet(low=3, above=(4, 6, 8)))
    assert position.num_rows == 5 + 1
    position.reach(3)
    assert position.num_rows == 7


def save(store: CheckpointStore, step: int) -> Path:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")

    return store.save(step, write, {"0.master": torch.ones(2)}, {"step": step}, {"run": "x"})


def test_checkpoints_keep_the_first_and_the_newest_across_restarts(tmp_path: Path) -> None:
    for start in (0, 3, 6):
        store = CheckpointStore(tmp_path, keep=2)
        for step in range(start, start + 3):
            save(store, step)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000000", "step-000007", "step-000008"]
    tensors, state = read_trainer(tmp_path / "step-000008")
    assert state == {"step": 8}
    assert torch.equal(tensors["0.master"], torch.ones(2))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_checkpoint_that_fails_leaves_the_older_ones_and_nothing_of_itself(
    tmp_path: Path, error: Exception
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)

    def full(_directory: Path) -> None:
        raise error

    with pytest.raises(CheckpointError, match="disk is full"):
        store.save(2, full, {}, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_half_written_checkpoint_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step-000004" / "trainer").mkdir(parents=True)
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    assert not list(tmp_path.iterdir())


def test_workers_claim_distinct_indexes_and_a_freed_one_is_taken_again(tmp_path: Path) -> None:
    first, first_lock = claim_index(tmp_path, "a")
    second, second_lock = claim_index(tmp_path, "b")
    assert (first, second) == (0, 1)
    first_lock.release()
    third, third_lock = claim_index(tmp_path, "c")
    assert third == 0
    holder = json.loads((tmp_path / "1" / "owner.lock").read_text())
    assert holder == {"pid": os.getpid(), "holder": "b"}
    for lock in (second_lock, third_lock):
        lock.release()


def test_a_claim_where_nothing_can_be_written_is_an_error_and_no_endless_search(
    tmp_path: Path,
) -> None:
    (tmp_path / "main").write_text("a file")
    with pytest.raises(ConfigError, match=r"choose a run\.directory"):
        claim_index(tmp_path / "main", "a worker")


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (0, 999_999, 1_000_000, 1_000_001):
        newest = save(store, step)
    assert store.newest() == newest
    assert (tmp_path / "step-1000000").exists()
