"""The drafter under evaluation, and the passes in which it drafts for the target.

Checkpoints of one shape share network, buffers and compiled code: only the weights are replaced.
"""

from pathlib import Path

from common.drafters.dflash.checkpoint import load_state
from common.drafters.dflash.config import DrafterSpec
from common.drafters.dflash.drafting import DraftContext, DraftRows
from common.drafters.dflash.model import DFlashDrafter
from common.target.features import FeatureTap
from services.evaluator.build import Bench
from services.evaluator.compile import forget_compiled
from services.evaluator.passes import Passes, num_columns_for
from services.evaluator.replay import ReplayWalker


class DrafterSeat:
    """Holds one drafter at a time, with its hooks on the target. `close` takes these off."""

    def __init__(self, bench: Bench, *, num_rows: int, replay_batch: int) -> None:
        self._bench = bench
        self._num_rows = num_rows
        self._replay_batch = replay_batch
        self._spec: DrafterSpec | None = None
        self._tap: FeatureTap | None = None

    def load(self, checkpoint: Path, spec: DrafterSpec) -> None:
        """Take a checkpoint's weights, and its shape where that is another one."""
        if spec != self._spec:
            self._fit(spec)
        load_state(self._drafter, checkpoint)

    def context(self) -> DraftContext:
        """Return an empty context of one sequence."""
        return DraftContext(self._drafter, self._bench.embedding, self._bench.head)

    def close(self) -> None:
        """Take the hooks off the target."""
        if self._tap:
            self._tap.close()
            self._tap = None

    def _fit(self, spec: DrafterSpec) -> None:
        self.close()
        forget_compiled()
        bench, model = self._bench, self._bench.model
        self._spec = spec
        drafter = DFlashDrafter(spec).to(model.device, model.dtype).eval()
        self._drafter = drafter.requires_grad_(requires_grad=False)
        self._tap = FeatureTap(model, spec.target_layer_ids)
        self.walker = ReplayWalker(
            model, self._tap, tolerance=bench.tolerance, batch=self._replay_batch
        )
        # The longest text, and a block behind it.
        num_columns = num_columns_for(bench.longest_text + spec.block_size)
        rows = DraftRows(
            self._drafter, bench.embedding, bench.head,
            num_rows=self._num_rows, num_columns=num_columns,
        )  # fmt: skip
        self.passes = Passes(
            model, num_rows=self._num_rows, num_columns=num_columns, tap=self._tap, proposer=rows
        )
