"""One training step on fixed buffers: row in, loss and gradients, optimizer; no host sync.

    load   copies a staged row and its draw into the static buffers
    micro  anchors, forward, loss, backward, sums           replayed as a CUDA graph on a GPU
    update mean gradient, clip, AdamW or Muon               replayed as a CUDA graph on a GPU

Sums stay on the device until `take_sums`, which is the one sync of a log interval.
"""

import torch
from torch import Tensor

from common.drafters.dflash.metrics import NUM_SCALARS
from common.drafters.dflash.objective import DFlashObjective, StagedRow
from common.tensors import RowBuffers
from services.drafter_worker.compile import CapturedStep, compile_whole, refuse_recompiles
from services.drafter_worker.optim import MasterOptimizer


class Stepper:
    """Owns the static buffers, the objective and the optimizer of one drafter."""

    def __init__(
        self,
        objective: DFlashObjective,
        optimizer: MasterOptimizer,
        buffers: RowBuffers,
        *,
        use_compile: bool,
        use_cuda_graphs: bool,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self._buffers = buffers
        device = buffers.token_ids.device
        draw = torch.zeros(3, dtype=torch.int64, device=device)
        self.row = StagedRow(**vars(buffers), draw=draw)
        num_sums = NUM_SCALARS + 2 * objective.drafter.spec.num_draft_tokens
        self._sums = torch.zeros(num_sums, device=device)
        self._weight_sum = torch.zeros((), device=device)
        self._forward = compile_whole(objective) if use_compile else objective
        self._captured: CapturedStep | None = None
        # The buffers hold no supervised token yet, so the first runs leave the weights alone.
        if use_cuda_graphs:
            self._captured = CapturedStep(self._micro, self._update)
        elif use_compile:
            self._micro()
            self._update()
        if use_compile:
            refuse_recompiles()
        if use_compile or use_cuda_graphs:
            self._sums.zero_()
            optimizer.num_skipped.zero_()

    @property
    def num_graph_replays(self) -> int:
        """CUDA-graph replays so far."""
        return self._captured.num_replays if self._captured else 0

    def load(self, row: RowBuffers, draw: tuple[int, int, int]) -> None:
        """Copy a row and its (seed, sequence, visit) into the static buffers."""
        self._buffers.copy_from(row)
        self.draw(draw)

    def draw(self, draw: tuple[int, int, int]) -> None:
        """Choose other anchors of the loaded row."""
        # A copy from pageable memory would wait for the step that is running.
        for place, number in enumerate(draw):
            self.row.draw[place].fill_(number)

    def micro(self) -> None:
        """Add the loaded row's gradients and sums."""
        if self._captured:
            self._captured.micro()
        else:
            self._micro()

    def update(self, learning_rate: float) -> None:
        """Apply one optimizer step with what has been added."""
        self.optimizer.learning_rate.fill_(learning_rate)
        if self._captured:
            self._captured.update()
        else:
            self._update()

    def take_sums(self) -> tuple[list[float], float]:
        """Return the packed sums since the last call and the last gradient norm. Syncs."""
        packed = torch.cat([self._sums, self.optimizer.gradient_norm[None]]).tolist()
        self._sums.zero_()
        return packed[:-1], packed[-1]

    def read_sums(self) -> tuple[float, ...]:
        """Return the packed sums since `take_sums`, and leave them. Syncs."""
        return tuple(self._sums.tolist())

    def put_sums(self, sums: tuple[float, ...]) -> None:
        """Go on from the packed sums of a checkpoint; those of another code's figures are dropped."""
        if len(sums) == self._sums.numel():
            self._sums.copy_(torch.tensor(sums))

    def shared_sums(self) -> list[Tensor]:
        """Return what a group adds up for a step: gradients, their weight, the packed sums."""
        return [*self.optimizer.gradient_sums, self._weight_sum, self._sums]

    @torch.no_grad()
    def forget(self) -> None:
        """Drop what has been added since the last step."""
        self.optimizer.forget()
        self._weight_sum.zero_()
        self._sums.zero_()

    def _micro(self) -> None:
        loss, sums = self._forward(self.row)
        self.optimizer.backward(loss)
        self._sums += sums
        self._weight_sum += sums[1]

    def _update(self) -> None:
        self.optimizer.update(self._weight_sum)
        self._weight_sum.zero_()
