"""Tables that the evaluator reads."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from common.config.loading import Table
from common.config.shared import ControlPlaneTable, RunTable, TargetTable


def _existing_file(path: Path) -> Path:
    # Found here, a wrong path ends a run before it trains, and not behind it.
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: no such file; give a JSONL file of held-out prompts")
    return path


class EvaluationTable(Table):
    """[evaluation]: which checkpoints, on what, how long."""

    prompts: Annotated[Path, AfterValidator(_existing_file)]
    """JSONL file of {"id"?, "messages"} lines that no drafter was trained on."""
    checkpoints: tuple[Path, ...] = ()
    """Checkpoint directories; empty takes the newest of each series of the run."""
    max_prompts: int = Field(default=16, ge=1)
    """Prompts that are used, from the start of the file."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Tokens at which an answer is cut."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of target and drafter; auto is float32 on a CPU, else `target.dtype`."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads; 0 lets torch decide, since a run's evaluation has the machine to itself."""
    tie_tolerance: float = Field(default=0.0, ge=0)
    """Logits closer than this, relative to the largest, are a tie; 0 takes it from the dtype."""
    replay_batch: int = Field(default=16, ge=1)
    """Blocks that the replay walk drafts at once."""


class EvaluatorConfig(Table):
    """What the evaluator is told."""

    run: RunTable = RunTable()
    target: TargetTable
    evaluation: EvaluationTable
    control_plane: ControlPlaneTable = ControlPlaneTable()
