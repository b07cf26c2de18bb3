"""How much a target is, from its files alone: no weights are read and no torch is loaded."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.shared import TargetTable
from common.target.files import locate

RUNTIME_BYTES = 3 << 29
"""CUDA's context, the libraries' workspaces and what else a running target needs."""
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_LONGEST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class TargetSize:
    """What memory follows from; a figure is 0 where the files do not say it, as for GGUF."""

    weight_bytes: int = 0
    """Of its parameters, in the element type that it is loaded in."""
    hidden_size: int = 0
    vocab_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    num_aux_layers: int = 0
    is_tied: bool = False

    @property
    def table_bytes(self) -> int:
        """Embedding and head in bfloat16."""
        return 2 * self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    def row_bytes(self, num_tokens: int) -> int:
        """The hidden states of so many tokens in bfloat16."""
        return 2 * num_tokens * self.num_aux_layers * self.hidden_size

    def layer_bytes(self, num_tokens: int) -> int:
        """What one layer's pass over so many tokens has in bfloat16: its stream, projections and MLP."""
        return 2 * num_tokens * (6 * self.hidden_size + 3 * self.intermediate_size)


def measure_target(table: TargetTable) -> TargetSize:
    """Return a target's size; raise `ConfigError` where its files cannot be found."""
    files = locate(table)
    if files.gguf_name:
        return TargetSize()
    config = _read(files.folder / "config.json")
    config = config.get("text_config") or config
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head")
    parameters = sum(map(_num_parameters, files.weight_files()))
    return TargetSize(
        weight_bytes=parameters * _ELEMENT_BYTES[table.dtype],
        hidden_size=hidden,
        vocab_size=_first(config, "vocab_size"),
        intermediate_size=_first(config, "intermediate_size", "n_inner") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=_first(config, "num_key_value_heads") or heads,
        head_dim=_first(config, "head_dim") or (hidden // heads if heads else 0),
        num_aux_layers=len(table.target_layer_ids) or table.num_aux_layers,
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def _first(config: dict[str, Any], *names: str) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # who loads the target says what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def _num_parameters(file: Path) -> int:
    """Return the elements of all tensors, by the header of a safetensors file; 0 where it has none."""
    with file.open("rb") as stream:
        length = stream.read(8)
        num_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 0 < num_bytes <= _LONGEST_HEADER_BYTES:
            return 0
        try:
            header = json.loads(stream.read(num_bytes))
        except ValueError:
            return 0
    tensors = [each for name, each in header.items() if name != "__metadata__"]
    return sum(math.prod(tensor["shape"]) for tensor in tensors)
