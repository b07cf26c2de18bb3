"""Rules of the speculators layout's own keys. No torch.

vLLM makes one flag of `sliding_window_non_causal` and applies it to every layer, full ones too:
they are bidirectional only where it says true. speculators itself reads it for sliding layers alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from common.drafters.dflash.config import FULL_ATTENTION
from common.drafters.dflash.findings import (
    SPECULATORS,
    VLLM,
    Finding,
    at,
    is_count,
    is_ids,
    table_at,
)
from common.drafters.dflash.network_rules import layer_types_of, network_findings
from common.drafters.dflash.zlab_rules import ascending_findings, mask_token_findings

Config = Mapping[str, Any]
ARCHITECTURE = "DFlashSpeculator"
_BOTH = (SPECULATORS, VLLM)


def speculators_findings(config: Config) -> list[Finding]:
    """Return every key of a speculators config.json that a reader would misread."""
    network = table_at(config, "transformer_layer_config")
    rules = (_identity, _blocks, _features, _attention, _verifier)
    found = [found for rule in rules for found in rule(config)]
    found += mask_token_findings("mask_token_id", at(config, "mask_token_id"), network)
    return found + network_findings(network, "transformer_layer_config.")


def _identity(config: Config) -> Iterator[Finding]:
    expected = {"speculators_model_type": "dflash", "architectures": [ARCHITECTURE]}
    for key, value in expected.items():
        if at(config, key) != value:
            yield Finding(key, at(config, key), repr(value), _BOTH, "choose the network by it")
    algorithm = at(table_at(config, "speculators_config"), "algorithm")
    if algorithm != "dflash":
        yield Finding("speculators_config.algorithm", algorithm, "'dflash'", _BOTH,
                      "choose the way of drafting by it")  # fmt: skip


def _blocks(config: Config) -> Iterator[Finding]:
    size = at(config, "block_size")
    if not is_count(size, 2):
        yield Finding("block_size", size, "the block size", _BOTH, "take 8")
    if at(config, "sample_from_anchor") is not False:
        yield Finding("sample_from_anchor", at(config, "sample_from_anchor"), "false", _BOTH,
                      "draft from slot 0, which is not trained")  # fmt: skip
    table = table_at(config, "speculators_config")
    name = table.get("default_proposal_method")
    methods = table.get("proposal_methods")
    chosen = [m for m in methods if isinstance(m, Mapping) and m.get("proposal_type") == name] \
        if isinstance(methods, list) else []  # fmt: skip
    got = at(chosen[0], "speculative_tokens") if chosen else methods
    if is_count(size, 2) and got != size - 1:
        yield Finding("speculators_config.proposal_methods", got,
                      f"{size - 1} speculative_tokens under {name!r}", _BOTH,
                      "draft another number of tokens than a block has")  # fmt: skip


def _features(config: Config) -> Iterator[Finding]:
    key, ids = "aux_hidden_state_layer_ids", at(config, "aux_hidden_state_layer_ids")
    if not is_ids(ids) or min(ids) < 1:
        yield Finding(key, ids, "the layers that were trained with, counted from 1", _BOTH,
                      "take others, or the embedding's output")  # fmt: skip
    else:
        yield from ascending_findings(key, ids)
    network = table_at(config, "transformer_layer_config")
    size, width = at(config, "draft_vocab_size"), at(config, "target_hidden_size")
    if size != network.get("vocab_size"):
        yield Finding("draft_vocab_size", size, f"{network.get('vocab_size')!r}, all tokens", _BOTH,
                      "need a head and maps of a smaller vocabulary")  # fmt: skip
    if width != network.get("hidden_size"):
        yield Finding("target_hidden_size", width, f"{network.get('hidden_size')!r}, as the drafter",
                      (VLLM,), "takes features of another width")  # fmt: skip


def _attention(config: Config) -> Iterator[Finding]:
    kinds = layer_types_of(table_at(config, "transformer_layer_config"))
    if set(kinds) - {FULL_ATTENTION}:
        yield Finding("transformer_layer_config.layer_types", kinds, "full_attention alone", _BOTH,
                      "begin a window at the anchor, not at the slot; make all layers causal or none")  # fmt: skip
    got = at(config, "sliding_window_non_causal")
    if got is not True:
        yield Finding("sliding_window_non_causal", got, "true", (VLLM,),
                      "makes full layers causal where it is false")  # fmt: skip


def _verifier(config: Config) -> Iterator[Finding]:
    verifier = table_at(table_at(config, "speculators_config"), "verifier")
    for key in ("name_or_path", "architectures"):
        if not verifier.get(key):
            yield Finding(f"speculators_config.verifier.{key}", at(verifier, key), "the target's",
                          _BOTH, "have no embedding and no head")  # fmt: skip
