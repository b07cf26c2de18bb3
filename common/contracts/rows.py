"""What a row is made of, as both sides of a ring must see it."""

from typing import Literal

import msgpack
import xxhash

from common.contracts.record import Record

AuxDtype = Literal["bfloat16", "float8_e4m3fn"]
Split = Literal["train", "held_out"]


class RowSchema(Record):
    """Geometry and identity of the rows in a ring; its fingerprint is in each slot header."""

    row_tokens: int
    """T: packed tokens in a row, a multiple of 128."""
    max_documents: int
    """D_max: entries in the table of documents."""
    hidden_size: int
    """H: width of the target's residual stream."""
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers whose output is kept, in this order."""
    aux_dtype: AuxDtype
    """Element type of `aux_hidden_states`."""
    has_last_hidden_states: bool
    """Whether rows carry the residual stream after the last layer, before the final norm."""
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


class DocumentSpan(Record):
    """Which sample lies where in a row."""

    sample_id: int
    tag: int
    start: int
    length: int
