"""Looks through a checkpoint folder, of whatever origin, for what an engine would misread. No torch.

Reads config.json and the header of model.safetensors; the layout is told by the config.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.drafters.dflash.findings import (
    NOTHING,
    RINGDRAFT,
    SGLANG,
    SPECULATORS,
    TRANSFORMERS,
    VLLM,
    ZLAB,
    Finding,
    at,
    is_count,
    table_at,
)
from common.drafters.dflash.speculators_rules import speculators_findings
from common.drafters.dflash.zlab_rules import zlab_findings
from common.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
Shape = tuple[int, ...]
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def lint(directory: Path) -> list[Finding]:
    """Return every key and tensor that some reader would take for something else.

    Raises:
        CheckpointError: a file that is missing, cut off, or none of its kind.
    """
    config = read_config(directory)
    tensors = read_header(directory / WEIGHTS_FILE)
    if "speculators_model_type" in config:
        network = table_at(config, "transformer_layer_config")
        found = speculators_findings(config)
        ids = config.get("aux_hidden_state_layer_ids")
    else:
        network = config
        found = [*zlab_findings(config), *_auto_map(directory, config)]
        ids = table_at(config, "dflash_config").get("target_layer_ids")
    found += _dtype(config, network, tensors)
    num_features = len(ids) if isinstance(ids, list) else 0
    shapes = expected_shapes(network, num_features)
    return found + list(_shapes(shapes, tensors)) if shapes else found


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json; raise `CheckpointError` where there is none."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {str(directory)!r}: {CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"checkpoint {str(directory)!r}: {CONFIG_FILE} is not an object")
    return config


def read_header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Return the element type and shape of each tensor of a safetensors file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"got a header of {size} bytes")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors = {n: (t["dtype"], tuple(t["shape"])) for n, t in header.items()}
        end = 8 + size + max((t["data_offsets"][1] for t in header.values()), default=0)
        if path.stat().st_size != end:
            raise ValueError(f"got {path.stat().st_size} bytes, expected {end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read: {error}") from error
    return tensors


def expected_shapes(network: Mapping[str, Any], num_features: int) -> dict[str, Shape]:
    """Return the shape of each tensor of a network; nothing where a size is missing."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim")  # fmt: skip
    sizes = [network.get(key) for key in keys]
    if not all(map(is_count, sizes)) or not num_features:
        return {}
    hidden, inner, num_layers, heads, kv_heads, width = (int(size or 0) for size in sizes)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, num_features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return shapes | {
        f"layers.{index}.{name}.weight": shape
        for index in range(num_layers)
        for name, shape in layer.items()
    }


def _shapes(shapes: dict[str, Shape], tensors: dict[str, tuple[str, Shape]]) -> Iterator[Finding]:
    for name in sorted(set(shapes) - set(tensors)):
        yield Finding(name, NOTHING, f"a tensor {list(shapes[name])}", (SGLANG, TRANSFORMERS),
                      "leave it random")  # fmt: skip
    for name in sorted(set(tensors) - set(shapes)):
        got = list(tensors[name][1])
        if name.startswith(("embed_tokens", "lm_head")):
            yield Finding(name, got, "no tensor: it is the target's", (VLLM,),
                          "uses it in place of the target's, SGLang does not")  # fmt: skip
        else:
            yield Finding(name, got, "no tensor of this name", (SGLANG, RINGDRAFT),
                          "SGLang drops it silently, ringdraft stops")  # fmt: skip
    for name in sorted(set(shapes) & set(tensors)):
        if tensors[name][1] != shapes[name]:
            yield Finding(name, list(tensors[name][1]), f"{list(shapes[name])} by {CONFIG_FILE}",
                          (SGLANG, VLLM, ZLAB, SPECULATORS, RINGDRAFT), "stop, or leave it random")  # fmt: skip


def _dtype(
    config: Mapping[str, Any], network: Mapping[str, Any], tensors: dict[str, tuple[str, Shape]]
) -> list[Finding]:
    kinds = sorted(
        {_DTYPES.get(dtype, dtype) for dtype, shape in tensors.values() if math.prod(shape)}
    )
    stated = config.get("dtype", config.get("torch_dtype", network.get("dtype")))
    if kinds == [stated]:
        return []
    expected = kinds[0] if len(kinds) == 1 else f"one type, got tensors of {', '.join(kinds)}"
    got = NOTHING if stated is None else stated
    return [Finding("dtype", got, expected, (TRANSFORMERS, ZLAB), "loads weights in another type")]


def _auto_map(directory: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    modules = {str(value).partition(".")[0] for value in table_at(config, "auto_map").values()}
    missing = sorted(name for name in modules if not (directory / f"{name}.py").is_file())
    if missing:
        yield Finding("auto_map", at(config, "auto_map"), f"nothing, or a file {missing[0]}.py",
                      (TRANSFORMERS,), "stops where it may load code")  # fmt: skip
