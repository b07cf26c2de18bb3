"""Rules of the z-lab layout's own keys: blocks, layer ids, mask token, causality. No torch.

Layer ids are 0-based decoder layers whose output is taken; vLLM's own key counts the same layer as
id + 1.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION
from common.drafters.dflash.findings import (
    NOTHING,
    RINGDRAFT,
    SGLANG,
    SPECFORGE,
    SPECULATORS,
    TRANSFORMERS,
    VLLM,
    ZLAB,
    Finding,
    at,
    is_count,
    is_ids,
    ours,
    table_at,
)
from common.drafters.dflash.network_rules import layer_types_of, network_findings

Config = Mapping[str, Any]
ARCHITECTURE = "DFlashDraftModel"
_NEUTRAL = {
    "output_multiplier": (None, 1.0),
    "input_embedding_scale": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
}
_VARIANTS = {
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
    "sample_from_anchor": (None, False),
    "markov_rank": (None, 0),
}


def zlab_findings(config: Config) -> list[Finding]:
    """Return every key of a z-lab config.json that a reader would misread."""
    rules = (
        _architecture, _block_size, _target_layers, _layer_ids, _mask_token, _causality,
        _forced_window, _scales, _variants,
    )  # fmt: skip
    return [found for rule in rules for found in rule(config)] + network_findings(config)


def mask_token_findings(key: str, got: Any, network: Config) -> Iterator[Finding]:
    """Yield what is wrong with a mask token's id, of either layout."""
    size, own = network.get("vocab_size"), ours(got)
    if not is_count(got, 0):
        yield Finding(key, got, "the id that was trained with", (SGLANG, SPECFORGE, *own),
                      "take a token of the tokenizer, or its pad, eos or unk")  # fmt: skip
    elif is_count(size) and got >= size:
        yield Finding(key, got, f"a row of the target's embedding, under {size}", (SGLANG, VLLM, RINGDRAFT),
                      "stop, or read a row that does not exist")  # fmt: skip


def ascending_findings(key: str, ids: list[int]) -> Iterator[Finding]:
    """Yield a finding where layer ids are not in the layers' order, in which engines capture."""
    if ids != sorted(set(ids)):
        yield Finding(key, ids, f"{sorted(set(ids))}, ascending and each once", (SGLANG, VLLM),
                      "join features in the layers' order, not in this one")  # fmt: skip


def _architecture(config: Config) -> Iterator[Finding]:
    got = at(config, "architectures")
    if got != [ARCHITECTURE]:
        readers = (SGLANG, VLLM) if got is NOTHING else (SGLANG, VLLM, RINGDRAFT)
        yield Finding("architectures", got, repr([ARCHITECTURE]), readers,
                      "choose the network by it, or take it for a DFlash of the first kind")  # fmt: skip


def _block_size(config: Config) -> Iterator[Finding]:
    outer, inner = at(config, "block_size"), at(table_at(config, "dflash_config"), "block_size")
    is_outer, is_inner = is_count(outer, 2), is_count(inner, 2)
    if not is_outer:
        yield Finding("block_size", outer, "the block size", (SPECFORGE, *ours(outer)),
                      "stops, it looks here alone")  # fmt: skip
    if not is_inner:
        yield Finding("dflash_config.block_size", inner, "the block size",
                      (ZLAB, SGLANG, *ours(inner)) if not is_outer or ours(inner) else
                      ("loaders of newer checkpoints",), "take 16")  # fmt: skip
    if is_outer and is_inner and outer != inner:
        yield Finding("block_size", outer, f"{inner} as in dflash_config", (SPECFORGE, SPECULATORS),
                      "take this one, z-lab and SGLang the other")  # fmt: skip


def _target_layers(config: Config) -> Iterator[Finding]:
    got = at(config, "num_target_layers")
    if not is_count(got):
        yield Finding("num_target_layers", got, "the target's decoder layers", (ZLAB, SPECFORGE),
                      "stop: they look at it even where layer ids are given")  # fmt: skip
    inner = at(table_at(config, "dflash_config"), "num_target_layers")
    if inner is not NOTHING and inner != got:
        yield Finding("dflash_config.num_target_layers", inner, f"{got!r} as at the top", (SGLANG,),
                      "take another layer for the last one")  # fmt: skip


def _layer_ids(config: Config) -> Iterator[Finding]:
    key = "dflash_config.target_layer_ids"
    ids = at(table_at(config, "dflash_config"), "target_layer_ids")
    if not is_ids(ids):
        yield Finding(key, ids, "the layers that were trained with",
                      (ZLAB, SPECFORGE, VLLM, SGLANG, *ours(ids)),
                      "take layers that are spread evenly, or stop")  # fmt: skip
        return
    yield from ascending_findings(key, ids)
    count = config.get("num_target_layers")
    if is_count(count) and max(ids) >= count - 1:
        yield Finding(key, ids, f"ids under {count - 1}", (TRANSFORMERS, ZLAB, SGLANG, VLLM),
                      "norm the last layer's output, or do not, or have no such layer")  # fmt: skip
    own = at(config, "eagle_aux_hidden_state_layer_ids")
    if own is not NOTHING and own != [layer + 1 for layer in ids]:
        yield Finding("eagle_aux_hidden_state_layer_ids", own,
                      f"{[layer + 1 for layer in ids]}, or nothing", (VLLM,),
                      "takes these layers in place of target_layer_ids + 1")  # fmt: skip


def _mask_token(config: Config) -> Iterator[Finding]:
    got = at(table_at(config, "dflash_config"), "mask_token_id")
    yield from mask_token_findings("dflash_config.mask_token_id", got, config)


def _causality(config: Config) -> Iterator[Finding]:
    """Full layers see their whole block and sliding ones what precedes; a flag is for all layers."""
    kinds = set(layer_types_of(config))
    places = {
        "is_causal": (at(config, "is_causal"), (ZLAB, VLLM, RINGDRAFT)),
        "dflash_config.causal": (
            at(table_at(config, "dflash_config"), "causal"),
            (VLLM, RINGDRAFT),
        ),
    }
    for key, (got, readers) in places.items():
        contradicted = FULL_ATTENTION if got else SLIDING_ATTENTION
        if got not in (NOTHING, None) and contradicted in kinds:
            yield Finding(key, got, "nothing: layer_types say it", readers,
                          f"make {contradicted} layers {'causal' if got else 'bidirectional'}, "
                          f"or do not know the key")  # fmt: skip


def _forced_window(config: Config) -> Iterator[Finding]:
    """vLLM puts a window on full layers where `use_swa` says so, and prefers its own width."""
    inner, is_sliding = (
        table_at(config, "dflash_config"),
        SLIDING_ATTENTION in layer_types_of(config),
    )
    if inner.get("use_swa") and not is_sliding:
        yield Finding("dflash_config.use_swa", inner["use_swa"], "nothing: layer_types say it",
                      (VLLM, RINGDRAFT), "put a window on every layer, or do not know the key")  # fmt: skip
    width = inner.get("swa_window_size")
    if is_sliding and width not in (None, config.get("sliding_window")):
        yield Finding("dflash_config.swa_window_size", width, "nothing, or sliding_window",
                      (VLLM, RINGDRAFT), "take this width, or do not know the key")  # fmt: skip


def _scales(config: Config) -> Iterator[Finding]:
    for key, neutral in _NEUTRAL.items():
        got = table_at(config, "dflash_config").get(key, config.get(key))
        if got not in neutral:
            yield Finding(f"dflash_config.{key}", got, "nothing", (SGLANG, RINGDRAFT),
                          "do not apply it, z-lab does")  # fmt: skip


def _variants(config: Config) -> Iterator[Finding]:
    for key, plain in _VARIANTS.items():
        got = table_at(config, "dflash_config").get(key, config.get(key))
        if got not in plain:
            yield Finding(f"dflash_config.{key}", got, "nothing: a DFlash of the first kind",
                          (ZLAB, RINGDRAFT), "take it for one, whose slots mean something else")  # fmt: skip
