"""The base of every record that crosses a process border."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

_set = object.__setattr__


class Record(BaseModel):
    """A frozen, strict record: no coercion, no unknown keys, no tensors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @classmethod
    def of_valid(cls, **fields: Any) -> Self:
        """Return the record of every field's value, unchecked: of values that this process made.

        For records that are made for each row: a check takes longer than all else of a message.
        What comes from another process is decoded, never made here.
        """
        record = cls.__new__(cls)
        _set(record, "__dict__", fields)
        _set(record, "__pydantic_fields_set__", set(fields))
        _set(record, "__pydantic_extra__", None)
        _set(record, "__pydantic_private__", None)
        return record
