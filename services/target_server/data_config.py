"""The [data] table: which conversations to read and how to pack them into rows."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from common.config.loading import Table


def _whole_tiles(row_tokens: int) -> int:
    if row_tokens < 128 or row_tokens % 128:
        nearest = (row_tokens // 128 + 1) * 128
        raise ValueError(
            f"got {row_tokens}, expected a multiple of 128, the tile of the attention kernels; {nearest} is the next"
        )
    return row_tokens


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: no such file; give a JSONL file of conversations")
    return path


class DataTable(Table):
    """[data]: which conversations to read and how to pack them into rows."""

    path: Annotated[Path, AfterValidator(_existing_file)]
    """JSONL file of conversations, {"id"?, "messages": [...], "tag"?, "finish_reason"?} a line."""
    row_tokens: Annotated[int, AfterValidator(_whole_tiles)] = 4096
    """Packed tokens in a row; a conversation that is longer is skipped as too_long."""
    max_documents: int = Field(default=64, ge=1, le=65536)
    """Most conversations in a row."""
    shuffle: bool = True
    """Whether the order of conversations is drawn from run.seed, otherwise the file's."""
    data_epochs: int = Field(default=1, ge=1)
    """Passes over the conversations."""
    max_conversations: int = Field(default=0, ge=0)
    """Use this many of the file's first conversations; 0 uses all."""
    keep_cut_answers: bool = True
    """Whether conversations with finish_reason "length" are used; their cut answer has no end of turn."""
    on_bad_row: Literal["skip", "fail"] = "skip"
    """What a conversation that cannot be used does: it is counted and skipped, or ends the run."""
    packing_window: int = Field(default=16, ge=1)
    """Open rows among which a conversation finds its place; more fill rows better."""
    count_ahead_conversations: int = Field(default=5000, ge=0)
    """The number of rows is counted before the first one where there are at most so many."""
    train_only_last_turn: bool = False
    """Whether the assistant's last turn of a conversation alone is supervised."""
    one_row_a_turn: bool = False
    """Whether each turn of the assistant is a sample of its own, as a reasoning model wrote it: behind
    the prompt that it had, without the reasoning of earlier turns where the template drops it."""
    allow_full_mask: bool = False
    """Whether every token may be supervised; in chats that means that prompts are trained on."""

    @model_validator(mode="after")
    def _one_choice_of_turns(self) -> "DataTable":
        if self.train_only_last_turn and self.one_row_a_turn:
            raise ValueError(
                "data.train_only_last_turn=true and data.one_row_a_turn=true exclude one another: "
                "a sample a turn supervises that turn alone; set one of them"
            )
        return self
