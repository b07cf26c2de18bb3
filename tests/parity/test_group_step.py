"""A group's steps against those of one worker with all rows: same losses, same weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.metrics import StepFigures, unpack_sums
from common.drafters.dflash.objective import DFlashObjective
from common.tensors import RowBuffers
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.meetings import Meeting
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper
from services.drafter_worker.sync import AllReduce
from tests.drafters import make_drafter, make_row, make_spec, make_tables
from tests.members import needs_torchft, with_members

NUM_TOKENS = 64
NUM_STEPS = 5
# Uneven rows: full, nearly empty, and a member that has none.
DOCUMENTS = {0: (30, 30), 1: (8,), 2: (20, 20, 20)}
MEMBERS = [[0], [1, 2], []]
SPEC = make_spec(num_layers=1)


def make_stepper() -> Stepper:
    drafter = make_drafter(SPEC)
    masters = [p.detach().clone() for p in drafter.parameters()]
    optimizer = MasterOptimizer(drafter.parameters(), masters, OptimizerTable(), accumulation=2)
    embedding, head = make_tables(SPEC)
    objective = DFlashObjective(
        drafter, embedding=embedding, head=head, num_anchors=8, max_documents=4,
        loss_chunk_rows=16, backend="dense",
    )  # fmt: skip
    width = len(SPEC.target_layer_ids) * SPEC.hidden_size
    ids = [torch.zeros(NUM_TOKENS, dtype=torch.int32) for _ in range(3)]
    mask, features = torch.zeros(NUM_TOKENS, dtype=torch.uint8), torch.zeros(NUM_TOKENS, width)
    buffers = RowBuffers(*ids, mask, features)
    return Stepper(objective, optimizer, buffers, use_compile=False, use_cuda_graphs=False)


def add_rows(stepper: Stepper, step: int, rows: list[int]) -> None:
    for row in rows:
        staged = make_row(SPEC, DOCUMENTS[row], NUM_TOKENS, seed=3 * step + row)
        stepper.load(RowBuffers(*staged[:5]), (1, 3 * step + row, 0))
        stepper.micro()


def end_step(stepper: Stepper) -> tuple[StepFigures, float]:
    stepper.update(1e-3)
    sums, norm = stepper.take_sums()
    return unpack_sums(sums), norm


@needs_torchft
def test_members_of_uneven_rows_step_as_one_worker_with_all_of_them(tmp_path: Path) -> None:
    def act(meeting: Meeting, index: int) -> tuple[list[tuple[StepFigures, float]], list[Tensor]]:
        stepper = make_stepper()
        exchange = AllReduce(stepper)
        figures = []
        for step in range(NUM_STEPS):
            add_rows(stepper, step, MEMBERS[index])
            meeting.sum(exchange.load(float(bool(MEMBERS[index])), meeting.place))
            exchange.take()
            figures.append(end_step(stepper))
        return figures, stepper.optimizer.masters

    (first, masters), *others = with_members(tmp_path, len(MEMBERS), act)
    for figures, same in others:
        assert figures == first
        assert all(torch.equal(a, b) for a, b in zip(masters, same, strict=True))
    one = make_stepper()
    for step in range(NUM_STEPS):
        add_rows(one, step, [row for rows in MEMBERS for row in rows])
        expected, norm = end_step(one)
        got, got_norm = first[step]
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.accepted_prefix_length == pytest.approx(expected.accepted_prefix_length)
        assert (got.num_blocks, got_norm) == (expected.num_blocks, pytest.approx(norm, rel=1e-4))
    for got_master, master in zip(masters, one.optimizer.masters, strict=True):
        torch.testing.assert_close(got_master, master, rtol=1e-4, atol=1e-5)
