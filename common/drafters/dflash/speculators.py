"""The speculators layout: `config.json` and `model.safetensors`, for speculators and for vLLM.

Only drafters whose layers are all full: this layout's window begins at the anchor, ours, as z-lab's,
at each slot; and vLLM makes the layers of a mixed drafter all causal or none.
Tensors have the names of the z-lab layout. Embedding and head are never written: speculators reads
them from the target's own files, engines share the target's. Layer ids count as id + 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from common.drafters.dflash.checkpoint import (
    WeightsDtype,
    network_config,
    write_config,
    write_weights,
)
from common.drafters.dflash.config import FULL_ATTENTION, DrafterSpec
from common.drafters.dflash.speculators_rules import ARCHITECTURE
from common.errors import ConfigError

FORMAT_VERSION = "0.9.0"
"""The release of speculators whose layout this is."""


@dataclass(frozen=True)
class TargetReference:
    """How readers find the target that a drafter belongs to."""

    name: str
    """A hub id or a model folder."""
    architectures: tuple[str, ...]


def check_layers(spec: DrafterSpec) -> None:
    """Refuse a drafter that this layout cannot express; raise `ConfigError` with the reason."""
    others = sorted(set(spec.layer_types) - {FULL_ATTENTION})
    if others:
        raise ConfigError(
            f"speculators layout: got layers of {', '.join(others)}, expected {FULL_ATTENTION} "
            f"alone: its window begins at the anchor and not at each slot, and vLLM makes the "
            f"layers of a mixed drafter all causal or none; export to the zlab layout"
        )


def write_speculators(
    directory: Path,
    state: dict[str, Tensor],
    spec: DrafterSpec,
    target: TargetReference,
    dtype: WeightsDtype,
) -> None:
    """Write the files into an existing directory."""
    check_layers(spec)
    write_weights(directory, state, dtype)
    write_config(directory, speculators_config(spec, target, dtype))


def speculators_config(
    spec: DrafterSpec, target: TargetReference, dtype: WeightsDtype
) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": spec.num_draft_tokens}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layer_ids],
        "target_hidden_size": spec.hidden_size,
        "draft_vocab_size": spec.vocab_size,
        "sample_from_anchor": False,
        # vLLM applies its opposite to every layer as `causal`; no layer here is sliding.
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": network_config(spec) | {"dtype": dtype},
    }
