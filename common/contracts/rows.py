"""What a row is made of, as both sides of a ring must see it."""

from typing import Annotated, Literal

import msgpack
import xxhash
from pydantic import Field

from common.contracts.record import Record

AuxDtype = Literal["bfloat16", "float8_e4m3fn"]
Split = Literal["train", "held_out"]
Extent = Annotated[int, Field(ge=1, lt=1 << 32)]
Unsigned16 = Annotated[int, Field(ge=0, lt=1 << 16)]
Unsigned32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Unsigned64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class RowSchema(Record):
    """Geometry and identity of the rows in a ring; its fingerprint is in each slot header."""

    row_tokens: Extent
    """T: packed tokens in a row, a multiple of 128."""
    max_documents: Extent
    """D_max: entries in the table of documents."""
    hidden_size: Extent
    """H: width of the target's residual stream."""
    target_layer_ids: tuple[Unsigned32, ...]
    """0-based decoder layers whose output is kept, in this order."""
    aux_dtype: AuxDtype
    """Element type of `aux_hidden_states`."""
    has_last_hidden_states_normed: bool
    """Whether rows carry the residual stream after the last layer and the final norm, which the
    target's head makes its logits of."""
    target_fingerprint: str
    """Identity of the target's weights and config."""
    template_fingerprint: str
    """Identity of tokenizer, chat template, its arguments, and the loss-mask rule."""
    feature_engine: str
    """Engine, version and dtype that compute the features."""

    @property
    def fingerprint(self) -> int:
        """64-bit hash of every field; equal schemas have equal fingerprints."""
        return xxhash.xxh3_64_intdigest(msgpack.packb(self.model_dump(mode="python")))

    def differences(self, expected: "RowSchema") -> str:
        """Name each field that differs from the same one of `expected`, with both values."""
        pairs = {
            name: (getattr(self, name), getattr(expected, name)) for name in type(self).model_fields
        }
        return "; ".join(
            f"{name} got {got!r}, expected {wanted!r}"
            for name, (got, wanted) in pairs.items()
            if got != wanted
        )


class DocumentSpan(Record):
    """Which sample lies where in a row."""

    sample_id: Unsigned64
    tag: Unsigned16
    start: Unsigned32
    length: Unsigned32
