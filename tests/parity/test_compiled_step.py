"""The compiled step against the eager one on a CPU: same rows, same losses."""

import pytest
import torch

from common.drafters.dflash.objective import DFlashObjective
from common.tensors import RowBuffers
from services.drafter_worker.compile import num_recompiles
from services.drafter_worker.config import OptimizerTable
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper
from tests.drafters import make_drafter, make_row, make_spec, make_tables

# A drafter's many C++ kernels take minutes to compile.
pytestmark = [
    pytest.mark.hammer,
    pytest.mark.timeout(1800),
    # torch's own, where Inductor is loaded.
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
]
NUM_TOKENS, NUM_STEPS = 64, 20


def train(*, compiled: bool) -> list[float]:
    """Return the losses of a tiny drafter's first steps."""
    spec = make_spec(num_layers=1)
    drafter = make_drafter(spec)
    masters = [p.detach().clone() for p in drafter.parameters()]
    optimizer = MasterOptimizer(drafter.parameters(), masters, OptimizerTable(learning_rate=1e-3))
    embedding, head = make_tables(spec)
    objective = DFlashObjective(
        drafter, embedding=embedding, head=head, num_anchors=8, max_documents=4,
        loss_chunk_rows=16, backend="dense",
    )  # fmt: skip
    width = len(spec.target_layer_ids) * spec.hidden_size
    ids = [torch.zeros(NUM_TOKENS, dtype=torch.int32) for _ in range(3)]
    mask, features = torch.zeros(NUM_TOKENS, dtype=torch.uint8), torch.zeros(NUM_TOKENS, width)
    buffers = RowBuffers(*ids, mask, features)
    stepper = Stepper(objective, optimizer, buffers, use_compile=compiled, use_cuda_graphs=False)
    losses = []
    for step in range(NUM_STEPS):
        row = make_row(spec, (20, 30), NUM_TOKENS, seed=step % 4)
        stepper.load(RowBuffers(*row[:5]), (1, step, 0))
        stepper.micro()
        stepper.update(1e-3)
        sums, _ = stepper.take_sums()
        losses.append(sums[0] / sums[1])
    return losses


def test_compiled_and_eager_steps_have_the_same_losses() -> None:
    eager = train(compiled=False)
    compiled = train(compiled=True)
    assert num_recompiles() == 0
    assert eager[-1] < eager[0]
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
    torch.compiler.set_stance("default")
