"""The drafter worker's config."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from common.config.loading import Table
from common.config.shared import (
    ControlPlaneTable,
    Groups,
    GroupTable,
    HeldOutTable,
    PlacementTable,
    RingTable,
    RunTable,
    TargetTable,
)
from common.drafters.dflash.config import DrafterTable, needs_target
from common.telemetry.trackers import TrackerName, check_installed


def _installed(names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    check_installed(names)
    return names


MatrixRate = Literal["original", "match_rms_adamw"]


class OptimizerTable(Table):
    """[optimizer]: how float32 master weights are changed, and by how much."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon` for matrices and AdamW for what is none."""
    learning_rate: float = Field(default=6e-4, gt=0)
    """Highest learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's addition to the root of the second moment."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's decay of the momentum."""
    matrix_rate: MatrixRate = "match_rms_adamw"
    """How Muon's learning rate goes with a matrix of r rows and c columns: `match_rms_adamw` by
    0.2 sqrt(max(r, c)), which moves it as far as AdamW would; `original` by sqrt(max(1, r / c))."""
    matrix_rate_ratio: float = Field(default=1.0, gt=0)
    """Muon's learning rate over AdamW's."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, of matrices and others alike."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Global norm that gradients are clipped to."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after warm-up: a half cosine down to zero; `wsd`, stable and then
    such a cosine over the last `decay_ratio`; or constant."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Part of the schedule that warms up."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Part of a `wsd` schedule over which the learning rate falls, at its end."""
    schedule_steps: int = Field(default=0, ge=0)
    """Steps of the schedule; 0 follows the stream: the row's sequence over the rows of the run."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> "OptimizerTable":
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"warmup_ratio {self.warmup_ratio} and decay_ratio {self.decay_ratio} are more than "
                f"the whole schedule; lower one so that their sum is at most 1"
            )
        return self


class TrainingTable(Table):
    """[training]: how long, how often, what is kept."""

    group: str = "main"
    """Group this worker trains in."""
    max_steps: int = Field(default=0, ge=0)
    """Optimizer steps after which the worker stops; 0: until the stream ends."""
    visits: int = Field(default=1, ge=1)
    """Micro-steps on a row, each with fresh anchors."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-steps an optimizer step."""
    log_steps: int = Field(default=10, ge=1)
    """Steps between two lines of metrics (one host sync each)."""
    checkpoint_steps: int = Field(default=200, ge=1)
    """Steps between two checkpoints."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints that stay, beside the one of step 0."""
    trackers: Annotated[tuple[TrackerName, ...], AfterValidator(_installed)] = ()
    """Where the curves of `metrics/` are shown as well; each is an extra of the package."""
    target_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long the worker waits for a silent target server."""


class WorkerConfig(Table):
    """Tables that the drafter worker reads."""

    run: RunTable = RunTable()
    target: TargetTable
    ring: RingTable = RingTable()
    groups: Groups = {"main": GroupTable()}
    drafter: DrafterTable = DrafterTable()
    optimizer: OptimizerTable = OptimizerTable()
    training: TrainingTable = TrainingTable()
    held_out: HeldOutTable = HeldOutTable()
    control_plane: ControlPlaneTable = ControlPlaneTable()
    placement: PlacementTable = PlacementTable()

    @model_validator(mode="after")
    def _agree(self) -> "WorkerConfig":
        if self.training.group not in self.groups:
            raise ValueError(
                f"training.group {self.training.group!r} is not in [groups]: {sorted(self.groups)}"
            )
        if needs_target(self.drafter.loss) and not self.target.last_hidden_states_normed:
            raise ValueError(
                f"drafter.loss {self.drafter.loss!r} compares with the target's distribution, which "
                f"rows carry with target.last_hidden_states_normed = true; set it, or drafter.loss "
                f"to 'cross_entropy' or 'dpace'"
            )
        return self
