"""[drafter] table and the resolved shape of a DFlash drafter. No torch."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from common.config.loading import Table
from common.errors import ConfigError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

FOREIGN_ROPE_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""What turns parts of a target's heads, or turns them by axes of images: a drafter's are turned whole,
and engines differ in whether they read these keys for a drafter."""

LossName = Literal["cross_entropy", "dpace", "kl", "total_variation", "lk"]
Precision = Literal["bf16", "fp8"]
FLOAT8_MULTIPLE = 16
"""Sizes that float8 products are made of."""
_LOSSES_AGAINST_TARGET = ("kl", "total_variation", "lk")


def needs_target(loss: LossName) -> bool:
    """Whether a loss compares with the target's distribution, which it needs in each row."""
    return loss in _LOSSES_AGAINST_TARGET


class DrafterTable(Table):
    """[drafter]: shape, start and objective of the drafter."""

    algorithm: Literal["dflash"] = "dflash"
    """Which drafter of `common/drafters`."""
    num_layers: int = Field(default=5, ge=1)
    """Decoder layers of the drafter."""
    block_size: int = Field(default=16, ge=2, le=64)
    """S: slots of a block, the anchor's included."""
    num_anchors: int = Field(default=512, ge=1)
    """A: anchors drawn from each row."""
    loss: LossName = "cross_entropy"
    """What a slot is trained on: `cross_entropy` with the text; `dpace`, the same, weighted by the
    drafter's own confidence; `kl`, `total_variation` or `lk` (a mixture of these two) to the target's
    distribution, for which rows must carry it: target.last_hidden_states_normed."""
    loss_decay_gamma: float = Field(default=7.0, ge=0)
    """Slot k weighs exp(-(k - 1) / gamma); 0 weighs all slots alike. `dpace` has weights of its own."""
    init: Literal["random", "target_layers"] = "random"
    """Initial weights: random, or the target's last layers, final norm and last feature."""
    init_from: Path | None = None
    """A drafter in the z-lab layout whose weights to start with, in place of `init`: a checkpoint of
    another run, or a released drafter. The other settings must be as it has them."""
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the MLP; 0 takes the target's."""
    num_heads: int = Field(default=0, ge=0)
    """Query heads; 0 takes the target's."""
    num_kv_heads: int = Field(default=0, ge=0)
    """Key and value heads; 0 takes the target's."""
    head_dim: int = Field(default=0, ge=0)
    """Width of a head; 0 takes the target's."""
    sliding_window: int = Field(default=0, ge=0)
    """W: context reach of sliding layers; 0 makes every layer full."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers that stay full where `sliding_window` is set."""
    loss_chunk_rows: int = Field(default=1024, ge=1)
    """Rows of the head's product that exist at once."""
    head_rows: int = Field(default=0, ge=0)
    """Rows that reach the head a micro-step, up to a multiple of 128; 0: all num_anchors * (block_size - 1).
    Where the supervised ones are more, whole blocks are dropped from the end and counted."""
    precision: Precision = "bf16"
    """Matrix products on CUDA: bfloat16, or `fp8` for projections and the head's logits."""
    compile: bool = True
    """Compile the step with torch.compile; used on CUDA."""
    compile_cache: Path = Path("~/.cache/ringdraft/compile")
    """Folder of compiled code, which runs and workers share; used on CUDA."""
    cuda_graphs: bool = True
    """Capture the step, compiled or not, in CUDA graphs; used on CUDA."""

    @model_validator(mode="after")
    def _starts_once(self) -> "DrafterTable":
        if self.init_from is not None and self.init != "random":
            raise ValueError(
                f"init {self.init!r} and init_from {str(self.init_from)!r} are two starts: drop one"
            )
        return self

    @model_validator(mode="after")
    def _windows_agree(self) -> "DrafterTable":
        if self.full_attention_layers and not self.sliding_window:
            raise ValueError(
                "full_attention_layers is set and sliding_window is 0: set a window, or drop it"
            )
        outside = [layer for layer in self.full_attention_layers if layer >= self.num_layers]
        if outside:
            raise ValueError(f"full_attention_layers {outside} are not under {self.num_layers}")
        return self


class TargetShape(Protocol):
    """What a drafter must know of its target's shape."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> dict[str, Any]: ...
    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class DrafterSpec:
    """Everything that fixes a drafter's network, resolved."""

    num_layers: int
    block_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int
    loss_decay_gamma: float

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed a block: `block_size - 1`."""
        return self.block_size - 1

    def decay(self) -> list[float]:
        """Weights of slots 1..S-1: exp(-(k - 1) / gamma), DFlash paper, equation 4."""
        gamma = self.loss_decay_gamma
        return [math.exp(-(k - 1) / gamma) if gamma else 1.0 for k in range(1, self.block_size)]

    def misfits(self, target: TargetShape) -> list[str]:
        """Name what shows that the drafter is of another target, for error messages."""
        pairs = {
            "hidden_size": (self.hidden_size, target.hidden_size),
            "vocab_size": (self.vocab_size, target.vocab_size),
            "num_target_layers": (self.num_target_layers, target.num_layers),
        }
        wrong = [f"{name} got {a}, expected {b}" for name, (a, b) in pairs.items() if a != b]
        ids, last = list(self.target_layer_ids), target.num_layers - 1
        if not all(0 <= layer < last for layer in ids):
            wrong.append(f"target_layer_ids got {ids}, expected 0 to {last - 1}")
        return wrong

    def differences(self, other: "DrafterSpec") -> list[str]:
        """Name every field in which two specs differ, for error messages."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]!r} and {theirs[name]!r}" for name in mine
                if mine[name] != theirs[name]]  # fmt: skip


def resolve_spec(
    table: DrafterTable,
    target: TargetShape,
    *,
    target_layer_ids: tuple[int, ...],
    mask_token_id: int,
) -> DrafterSpec:
    """Fill the table's zeros from the target; raise `ConfigError` for shapes that cannot be."""
    num_heads = table.num_heads or target.num_heads
    num_kv_heads = table.num_kv_heads or target.num_kv_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"drafter.num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}"
        )
    spec = DrafterSpec(
        num_layers=table.num_layers,
        block_size=table.block_size,
        hidden_size=target.hidden_size,
        intermediate_size=table.intermediate_size or target.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=table.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=own_rope(target.rope),
        max_position_embeddings=target.max_position_embeddings,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(target_layer_ids),
        mask_token_id=mask_token_id,
        layer_types=_layer_types(table),
        sliding_window=table.sliding_window,
        loss_decay_gamma=table.loss_decay_gamma,
    )
    if table.precision == "fp8":
        _check_sizes_for_float8(spec)
    return spec


def own_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a drafter's `rope_parameters` of its target's."""
    return {key: value for key, value in rope.items() if key not in FOREIGN_ROPE_KEYS}


def _check_sizes_for_float8(spec: DrafterSpec) -> None:
    sizes = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads * head_dim": spec.num_heads * spec.head_dim,
        "num_kv_heads * head_dim": spec.num_kv_heads * spec.head_dim,
        "vocab_size": spec.vocab_size,
    }
    wrong = {name: size for name, size in sizes.items() if size % FLOAT8_MULTIPLE}
    if wrong:
        raise ConfigError(
            f"drafter.precision 'fp8' needs sizes in multiples of {FLOAT8_MULTIPLE}: got "
            f"{', '.join(f'{name} {size}' for name, size in wrong.items())}; set it to 'bf16'"
        )


def _layer_types(table: DrafterTable) -> tuple[str, ...]:
    return tuple(
        SLIDING_ATTENTION
        if table.sliding_window and layer not in table.full_attention_layers
        else FULL_ATTENTION
        for layer in range(table.num_layers)
    )
