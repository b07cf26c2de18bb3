"""The drafter worker's config."""

from typing import Literal

from pydantic import Field, model_validator

from common.config.loading import Table
from common.config.shared import (
    ControlPlaneTable,
    Groups,
    GroupTable,
    RingTable,
    RunTable,
    TargetTable,
)
from common.drafters.dflash.config import DrafterTable, needs_target


class OptimizerTable(Table):
    """[optimizer]: AdamW on float32 master weights."""

    learning_rate: float = Field(default=6e-4, gt=0)
    """Highest learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Global norm that gradients are clipped to."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after warm-up; cosine ends at zero."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Part of the schedule that warms up."""
    schedule_steps: int = Field(default=0, ge=0)
    """Steps of the schedule; 0 follows the stream: the row's sequence over the rows of the run."""


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
    control_plane: ControlPlaneTable = ControlPlaneTable()

    @model_validator(mode="after")
    def _agree(self) -> "WorkerConfig":
        if self.training.group not in self.groups:
            raise ValueError(
                f"training.group {self.training.group!r} is not in [groups]: {sorted(self.groups)}"
            )
        if self.run.device == "cuda" and not self.drafter.compile and self.drafter.cuda_graphs:
            raise ValueError(
                "drafter.cuda_graphs needs drafter.compile on CUDA; set both or neither"
            )
        if needs_target(self.drafter.loss) and not self.target.last_hidden_states_normed:
            raise ValueError(
                f"drafter.loss {self.drafter.loss!r} compares with the target's distribution, which "
                f"rows carry with target.last_hidden_states_normed = true; set it, or drafter.loss "
                f"to 'cross_entropy' or 'dpace'"
            )
        return self
