"""The target families that are tested, and what each fixes; a target's config says the rest.

What the drafter takes of a target is the same for all of them:

* features are the residual stream after a decoder layer, whatever norms the layer has inside;
* embedding rows are read raw. Where a target scales its inputs (Gemma: by sqrt(H)), the drafter does
  not: published checkpoints without `input_embedding_scale` mean 1, and so do engines that share the
  target's table;
* draft logits are the product with the head's weight, uncapped and without a bias. A cap changes no
  argmax; losses against the target's distribution cap the target's logits, not the draft's;
* rotary embedding is the target's where its frequencies are fixed, over whole heads
  (`drafters/dflash/config.py` says why), also beside a target that turns a part of them.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from common.config.shared import TargetTable
from common.errors import ConfigError

NormForm = Literal["weight", "one_plus_weight", "layer_norm"]
"""x / rms(x) * w, x / rms(x) * (1 + w), or LayerNorm with a bias."""

# Kinds whose frequencies do not follow the length of the text: a drafter computes them once.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class TargetFamily:
    """What holds for every target of one `model_type`."""

    norm: NormForm | None = "weight"
    """Form of the final norm; None where it is not known."""
    final_norm: str = "norm"
    """Name of the final norm in the decoder."""
    scales_embedding: bool = False
    """Whether inputs are embedding rows times sqrt(H)."""
    has_head_bias: bool = False
    """Whether the head adds a bias to its product."""
    is_packed: bool = True
    """Whether transformers keeps packed documents apart; the start-up check measures it."""
    starts_drafter: bool = False
    """Whether its layers are like the drafter's: two norms, separate projections, a SiLU MLP."""
    attention: Literal["sdpa", "eager"] | None = "sdpa"
    """Attention of transformers that computes all the family has; None: transformers' choice."""

    def embedding_scale(self, hidden_size: int) -> float:
        """Return by what the target multiplies embedding rows, for rows of `hidden_size`."""
        return math.sqrt(hidden_size) if self.scales_embedding else 1.0


_QWEN_HYBRID = TargetFamily(norm="one_plus_weight", is_packed=False)
"""Linear-attention layers, whose state runs on from one packed document into the next."""
_GEMMA = TargetFamily(norm="one_plus_weight", scales_embedding=True)
"""Four norms a layer, by names that mean other places than the drafter's."""

FAMILIES: dict[str, TargetFamily] = {
    "llama": TargetFamily(starts_drafter=True),
    "mistral": TargetFamily(starts_drafter=True),
    "smollm3": TargetFamily(starts_drafter=True),
    "qwen2": TargetFamily(starts_drafter=True),
    "qwen3": TargetFamily(starts_drafter=True),
    "qwen3_moe": TargetFamily(),
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi": TargetFamily(norm="layer_norm", final_norm="final_layernorm", has_head_bias=True),
    "phi3": TargetFamily(),
    # Its attention sinks are in eager attention alone, and its masks do not ask for positions.
    "gpt_oss": TargetFamily(attention="eager", is_packed=False),
}
"""By the `model_type` of the text part of a config."""
UNTESTED = TargetFamily(norm=None, attention=None)


def family_of(config: Any, table: TargetTable) -> TargetFamily:
    """Return the family of a text config, or refuse one that no test covers."""
    family = FAMILIES.get(config.model_type)
    if family is None and not table.allow_untested_target:
        raise ConfigError(
            f"target.model {table.model!r}: got a target of type {config.model_type!r}, which is "
            f"not tested; expected one of {', '.join(sorted(FAMILIES))}. Its features, norm, head "
            f"and packing may be read wrongly: choose a tested target, or set "
            f"target.allow_untested_target = true and read the start-up checks in /status"
        )
    family = family or UNTESTED
    if family.has_head_bias and table.last_hidden_states_normed:
        raise ConfigError(
            f"target.last_hidden_states_normed = true: got a target of type {config.model_type!r}, "
            f"whose head has a bias that losses against its distribution do not know; set it to "
            f"false, and drafter.loss to 'cross_entropy' or 'dpace'"
        )
    return family


def attention_of(config: Any, family: TargetFamily) -> str | None:
    """Return the attention to load a target with; None leaves the choice to transformers."""
    # SDPA takes no cap on scores, and transformers leaves it out without a word.
    if getattr(config, "attn_logit_softcapping", None):
        return "eager"
    return family.attention


def logit_softcap_of(config: Any) -> float:
    """Return c of logits c * tanh(logits / c), or 0 where they are not capped."""
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)


def fixed_rope(config: Any) -> dict[str, Any]:
    """Return the rotary embedding of a text config as far as a drafter can take it over.

    The target's own; of targets with one a kind of layer, that of full attention.
    Kinds that follow the length of the text become plain ones of the same theta: a drafter is
    trained and served on one set of frequencies.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in rope.values()):
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", _ROPE_THETA)
    if rope["rope_type"] in _FIXED_ROTARY:
        return rope
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
