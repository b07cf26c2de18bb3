"""Tables that the evaluator reads."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from common.config.loading import Table
from common.config.shared import ControlPlaneTable, PlacementTable, RunTable, TargetTable


def _existing_file(path: Path) -> Path:
    # Found here, a wrong path ends a run before it trains, and not behind it.
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: no such file; give a JSONL file of held-out prompts")
    return path


def _rising(edges: tuple[int, ...]) -> tuple[int, ...]:
    if list(edges) != sorted(set(edges)) or any(edge < 1 for edge in edges):
        raise ValueError(f"got {list(edges)}, expected rising numbers of tokens from 1 on")
    return edges


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int | float) else value


PromptFile = Annotated[Path, AfterValidator(_existing_file)]
Temperatures = Annotated[
    tuple[Literal[0, 1], ...], BeforeValidator(_listed), Field(min_length=1, max_length=2)
]


class PromptSourceTable(Table):
    """One of [[evaluation.sources]]: a file of held-out prompts."""

    path: PromptFile
    """JSONL file of {"id"?, "tag"?, "messages"} or {"prompt"} lines that no drafter was trained on."""
    tag: str = ""
    """Name under which its prompts are reported; the file's name without endings where empty."""

    @property
    def tag_name(self) -> str:
        """The tag, or what stands for it."""
        return self.tag or self.path.name.split(".")[0]


class ArmTable(Table):
    """[evaluation.arms.<name>]: one way to ask the prompts."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking, over target.chat_template_kwargs."""


class EvaluationTable(Table):
    """[evaluation]: which checkpoints, on what, how long."""

    prompts: PromptFile | None = None
    """The one file of held-out prompts; with several, `sources` takes its place."""
    sources: tuple[PromptSourceTable, ...] = ()
    """Several files of held-out prompts, each with a tag."""
    checkpoints: tuple[Path, ...] = ()
    """Checkpoint directories; empty takes the newest of each series of the run."""
    follow: bool = False
    """Whether to evaluate each checkpoint of the run as it comes, until training has ended."""
    arms: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")], ArmTable],
        Field(min_length=1),
    ] = {"main": ArmTable()}
    """Ways to ask, such as with thinking and without; the first is the one that `best` follows."""
    temperature: Temperatures = (0,)
    """0: greedy, 1: sampled of the target's distribution, or both; `best` follows the first."""
    max_prompts: int = Field(default=16, ge=1)
    """Prompts that are used of each file, from its start."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Tokens at which an answer is cut."""
    batch_size: int = Field(default=16, ge=1)
    """Answers that are decoded together."""
    context_buckets: Annotated[tuple[int, ...], AfterValidator(_rising)] = (512, 2048, 8192)
    """Context lengths at which figures are split, in tokens."""
    alarm_share: float = Field(default=0.05, gt=0, lt=1)
    """Share by which acceptance may fall below its best before an alarm is raised."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of target and drafter; auto is float32 on a CPU, else `target.dtype`."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads; 0 lets torch decide, since a run's evaluation has the machine to itself."""
    tie_tolerance: float = Field(default=0.0, ge=0)
    """Logits closer than this, relative to the largest, are a tie; 0 takes it from the dtype."""
    replay_batch: int = Field(default=16, ge=1)
    """Blocks that the replay walk drafts at once."""

    @property
    def prompt_sources(self) -> tuple[PromptSourceTable, ...]:
        """All files of prompts."""
        return self.sources if self.prompts is None else (PromptSourceTable(path=self.prompts),)

    @model_validator(mode="after")
    def _has_prompts_once(self) -> "EvaluationTable":
        if (self.prompts is None) == (not self.sources):
            raise ValueError(
                "got prompts and sources, expected one of them"
                if self.sources
                else "prompts is not set; give a JSONL file of held-out prompts"
            )
        return self

    @model_validator(mode="after")
    def _follows_or_lists(self) -> "EvaluationTable":
        if self.follow and self.checkpoints:
            raise ValueError("got follow and checkpoints, expected one of them")
        return self


class EvaluatorConfig(Table):
    """What the evaluator is told."""

    run: RunTable = RunTable()
    target: TargetTable
    evaluation: EvaluationTable
    control_plane: ControlPlaneTable = ControlPlaneTable()
    placement: PlacementTable = PlacementTable()
