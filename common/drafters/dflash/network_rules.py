"""Rules of the keys that shape a drafter's layers, wherever a layout puts them. No torch.

Readers build the layers with transformers' Qwen3 config, whose defaults stand in, silently, for
whatever is missing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from common.drafters.dflash.config import FOREIGN_ROPE_KEYS, FULL_ATTENTION, SLIDING_ATTENTION
from common.drafters.dflash.findings import (
    NOTHING,
    RINGDRAFT,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    ZLAB,
    Finding,
    at,
    is_count,
    ours,
    table_at,
)

Network = Mapping[str, Any]
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_BUILDERS = (TRANSFORMERS, ZLAB, SGLANG, VLLM)
_DEFAULT_INSTEAD = "take the default of Qwen3 for it"


def network_findings(network: Network, prefix: str = "") -> list[Finding]:
    """Return what is wrong with the layers' keys; `prefix` is where the layout puts them."""
    rules = (
        _model_type,
        _sizes,
        _rope,
        _foreign_rope,
        _rope_scaling,
        _layer_types,
        _window,
        _fixed_keys,
    )
    return [
        Finding(f"{prefix}{found.key}", found.got, found.expected, found.readers, found.harm)
        for rule in rules
        for found in rule(network)
    ]


def layer_types_of(network: Network) -> list[str]:
    """Return the kinds of the layers, all full where the key is missing or is no list."""
    kinds = network.get("layer_types")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    count = network.get("num_hidden_layers")
    return [FULL_ATTENTION] * (count if is_count(count) else 0)


def _model_type(network: Network) -> Iterator[Finding]:
    got = at(network, "model_type")
    if got != "qwen3":
        yield Finding("model_type", got, "'qwen3'", (TRANSFORMERS, VLLM, RINGDRAFT),
                      "build layers of another family")  # fmt: skip


def _sizes(network: Network) -> Iterator[Finding]:
    for key in _SIZES:
        got = at(network, key)
        if not is_count(got):
            yield Finding(key, got, "a positive number", (*_BUILDERS, *ours(got)), _DEFAULT_INSTEAD)
    heads, kv_heads = network.get("num_attention_heads"), network.get("num_key_value_heads")
    if is_count(heads) and is_count(kv_heads) and heads % kv_heads:
        yield Finding("num_key_value_heads", kv_heads, f"a divisor of {heads} heads", (*_BUILDERS, RINGDRAFT),
                      "cannot share keys among the heads")  # fmt: skip
    eps = at(network, "rms_norm_eps")
    if not isinstance(eps, float) or not eps > 0:
        yield Finding("rms_norm_eps", eps, "a small number, such as 1e-06", (*_BUILDERS, *ours(eps)),
                      _DEFAULT_INSTEAD)  # fmt: skip


def _rope(network: Network) -> Iterator[Finding]:
    legacy = at(network, "rope_theta")
    theta = at(table_at(network, "rope_parameters"), "rope_theta")
    if legacy is NOTHING and theta is NOTHING:
        yield Finding("rope_theta", legacy, "the base, here and in rope_parameters", _BUILDERS,
                      "take 10000, or a base of their own")  # fmt: skip
    elif legacy is NOTHING:
        yield Finding("rope_theta", legacy, f"{theta!r}, here as well", (SGLANG, VLLM),
                      "releases that know no rope_parameters take a base of their own")  # fmt: skip
    elif theta not in (NOTHING, legacy):
        yield Finding("rope_theta", legacy, f"{theta!r} as in rope_parameters", (SGLANG, VLLM),
                      "releases that know no rope_parameters turn heads by it")  # fmt: skip


def _foreign_rope(network: Network) -> Iterator[Finding]:
    for key in FOREIGN_ROPE_KEYS:
        value = table_at(network, "rope_parameters").get(key, network.get(key))
        if value not in (None, 1.0):
            yield Finding(f"rope_parameters.{key}", value, "nothing: whole heads are turned",
                          (VLLM,), "turns less of a head, or by other axes")  # fmt: skip


def _rope_scaling(network: Network) -> Iterator[Finding]:
    current, legacy = table_at(network, "rope_parameters"), table_at(network, "rope_scaling")
    kind = current.get("rope_type", "default")
    legacy_kind = legacy.get("rope_type", legacy.get("type", "default"))
    if current and kind != legacy_kind:
        yield Finding("rope_scaling", at(network, "rope_scaling"),
                      "null" if kind == "default" else f"{dict(current)!r} as in rope_parameters",
                      (SGLANG, VLLM), "scale positions unlike transformers")  # fmt: skip
    elif current and legacy:
        unlike = {key for key in set(legacy) - {"type", "rope_theta"}
                  if legacy[key] != current.get(key)}  # fmt: skip
        if unlike:
            yield Finding("rope_scaling", dict(legacy), f"{dict(current)!r} as in rope_parameters",
                          (SGLANG, VLLM), "scale positions unlike transformers")  # fmt: skip


def _layer_types(network: Network) -> Iterator[Finding]:
    got, count = at(network, "layer_types"), network.get("num_hidden_layers")
    if got is NOTHING or got is None:
        yield Finding("layer_types", got, f"{count} kinds", (TRANSFORMERS, ZLAB, VLLM),
                      "make kinds from max_window_layers, or make all full")  # fmt: skip
        return
    known = isinstance(got, list) and set(layer_types_of(network)) <= {
        FULL_ATTENTION,
        SLIDING_ATTENTION,
    }
    if not known or len(got) != count:
        yield Finding("layer_types", got, f"{count} of 'full_attention' and 'sliding_attention'",
                      (*_BUILDERS, RINGDRAFT), "attend otherwise, or stop")  # fmt: skip


def _window(network: Network) -> Iterator[Finding]:
    window, used = at(network, "sliding_window"), at(network, "use_sliding_window")
    if SLIDING_ATTENTION in layer_types_of(network):
        if used is not True:
            yield Finding("use_sliding_window", used, "true, since layers are sliding",
                          (TRANSFORMERS, ZLAB, RINGDRAFT), "drop the window")  # fmt: skip
        if not is_count(window):
            yield Finding("sliding_window", window, "the window, since layers are sliding",
                          (*_BUILDERS, RINGDRAFT), "attend without a window, or stop")  # fmt: skip


def _fixed_keys(network: Network) -> Iterator[Finding]:
    if network.get("hidden_act", "silu") != "silu":
        yield Finding("hidden_act", network["hidden_act"], "'silu'", (SGLANG, RINGDRAFT),
                      "stop, or take 'silu'")  # fmt: skip
    if network.get("attention_bias"):
        yield Finding("attention_bias", network["attention_bias"], "false", (RINGDRAFT,),
                      "has no biases")  # fmt: skip
    if network.get("tie_word_embeddings"):
        yield Finding("tie_word_embeddings", True, "false: head and embedding are the target's",
                      (TRANSFORMERS, VLLM), "may tie a head to an embedding that is not here")  # fmt: skip
    if is_count(network.get("num_experts")):
        yield Finding("num_experts", network["num_experts"], "nothing", (VLLM, RINGDRAFT),
                      "have one MLP a layer")  # fmt: skip
