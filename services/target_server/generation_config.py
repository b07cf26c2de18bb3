"""The [generation] table: how the target writes answers."""

from pydantic import Field

from common.config.loading import Table


class GenerationTable(Table):
    """[generation]: how the target, or a server that serves it, writes answers."""

    max_new_tokens: int = Field(default=512, ge=1)
    """Length at which an answer is cut."""
    batch_size: int = Field(default=32, ge=1)
    """Answers that this process writes together."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that have this share of the probability; 1 is all."""
    top_k: int = Field(default=0, ge=0)
    """Sample among so many of the likeliest tokens; 0 is all."""
