"""The base of every record that crosses a process border."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen, strict record: no coercion, no unknown keys, no tensors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
