"""The [data] table: which conversations to read and how to pack them into rows."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from common.config.loading import Table

Format = Literal["auto", "messages", "sharegpt", "prompt", "pretokenised"]


def _whole_tiles(row_tokens: int) -> int:
    if row_tokens < 128 or row_tokens % 128:
        nearest = (row_tokens // 128 + 1) * 128
        raise ValueError(
            f"got {row_tokens}, expected a multiple of 128, the tile of the attention kernels; {nearest} is the next"
        )
    return row_tokens


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(
            f"{str(path)!r}: no such file; give conversations as .jsonl, .jsonl.gz, .jsonl.zst or "
            f".parquet, or as a folder of a Hugging Face dataset"
        )
    return path


ExistingPath = Annotated[Path, AfterValidator(_existing)]


class SourceTable(Table):
    """One of [[data.sources]]: a file or folder of conversations."""

    path: ExistingPath
    """A .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, or a folder that `datasets` can read."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """How often a data epoch has each of its conversations: 2 is twice, 0.5 every other one."""
    tag: str = ""
    """Name under which its documents are counted in metrics; the file's name without endings where empty."""
    format: Format = "auto"
    """What its rows hold; "auto" tells by each row's keys."""

    @property
    def tag_name(self) -> str:
        """The tag, or what stands for it."""
        return self.tag or self.path.name.split(".")[0]


class DataTable(Table):
    """[data]: which conversations to read and how to pack them into rows."""

    source: Literal["conversations", "prompts"] = "conversations"
    """Whether the answers are in the files, or the target writes them as the run goes ([generation])."""
    path: ExistingPath | None = None
    """The one file or folder of conversations; with several, `sources` takes its place."""
    sources: tuple[SourceTable, ...] = ()
    """Several files or folders, each with a weight and a tag."""
    row_tokens: Annotated[int, AfterValidator(_whole_tiles)] = 4096
    """Packed tokens in a row; a conversation that is longer is skipped as too_long."""
    max_documents: int = Field(default=64, ge=1, le=65536)
    """Most conversations in a row."""
    shuffle: bool = True
    """Whether the order of conversations is drawn from run.seed, otherwise the files'."""
    shuffle_buffer: int = Field(default=10_000, ge=1)
    """Rows of a compressed file among which the next is drawn: it can only be read from its start."""
    data_epochs: int = Field(default=1, ge=1)
    """Passes over the conversations."""
    max_conversations: int = Field(default=0, ge=0)
    """Use this many of each file's first conversations; 0 uses all."""
    keep_cut_answers: bool = True
    """Whether conversations with finish_reason "length" are used; their cut answer has no end of turn."""
    on_bad_row: Literal["skip", "fail"] = "skip"
    """What a conversation that cannot be used does: it is counted and skipped, or ends the run."""
    packing_window: int = Field(default=16, ge=1)
    """Open rows among which a conversation finds its place; more fill rows better."""
    count_ahead_bytes: int = Field(default=2 << 20, ge=0)
    """The number of rows is counted before the first one where the files are at most so large."""
    cursor_rows: int = Field(default=256, ge=1)
    """Rows between two saved cursors: a resume packs at most so many rows again."""
    train_only_last_turn: bool = False
    """Whether the assistant's last turn of a conversation alone is supervised."""
    one_row_a_turn: bool = False
    """Whether each turn of the assistant is a sample of its own, as a reasoning model wrote it: behind
    the prompt that it had, without the reasoning of earlier turns where the template drops it."""
    allow_full_mask: bool = False
    """Whether every token may be supervised; in chats that means that prompts are trained on."""

    @model_validator(mode="after")
    def _one_way_to_name_files(self) -> "DataTable":
        if (self.path is None) == (not self.sources):
            got = "neither" if self.path is None else "both"
            raise ValueError(
                f"got {got} of data.path and data.sources, expected one of them: a path, or "
                f"[[data.sources]] tables with a path each"
            )
        return self

    @model_validator(mode="after")
    def _one_choice_of_turns(self) -> "DataTable":
        if self.train_only_last_turn and self.one_row_a_turn:
            raise ValueError(
                "data.train_only_last_turn=true and data.one_row_a_turn=true exclude one another: "
                "a sample a turn supervises that turn alone; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_one_answer(self) -> "DataTable":
        for key in ("train_only_last_turn", "one_row_a_turn", "allow_full_mask"):
            if self.source == "prompts" and getattr(self, key):
                raise ValueError(
                    f'data.{key}=true does nothing with data.source="prompts", where the answer that '
                    f"the target writes is all that is supervised; leave it out"
                )
        return self

    @property
    def all_sources(self) -> tuple[SourceTable, ...]:
        """The sources, in order; `path` is one with weight 1."""
        return (SourceTable(path=self.path),) if self.path is not None else self.sources
