"""Reads single tensors of the target from its own files: embedding and head, decoder layers.

A drafter shares the target's embedding and head, frozen. They are read by name, so that a
worker beside a target of hundreds of gigabytes touches only what it needs, and they equal what
transformers would load.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from common.config.shared import TargetTable
from common.errors import ConfigError
from common.target.features import decoder_of
from common.target.files import TargetFiles, locate
from common.target.loading import load_target

# Where families put the text decoder inside their checkpoints.
_DECODER_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "language_model.",
    "text_model.",
    "",
)
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True)
class FrozenTables:
    """The target's embedding and output head; one tensor twice where they are tied."""

    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]


def load_embedding_and_head(
    table: TargetTable, device: torch.device | str, dtype: torch.dtype
) -> FrozenTables:
    """Read the two tables, and nothing else, from the target's files."""
    files = locate(table)
    read = _read_gguf_tables if files.gguf_name else _read_safetensors_tables
    embedding, head = read(files)
    frozen = embedding.to(device, dtype).contiguous()
    if head is None or head is embedding:
        return FrozenTables(frozen, frozen)
    return FrozenTables(frozen, head.to(device, dtype).contiguous())


def load_decoder_layers(
    table: TargetTable,
    layer_ids: tuple[int, ...],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return `layers.<id>.<name>` for each layer and `norm.weight`, the final norm."""
    files = locate(table)
    wanted = tuple(f"layers.{layer}." for layer in layer_ids)
    if files.gguf_name:
        # GGUF stores the q and k projections of some families with permuted rows; the loader of
        # transformers undoes that, and a demo-sized model is all that one loads from GGUF.
        model = load_target(table.model_copy(update={"dtype": "float32"}), "cpu")
        found = {
            name: tensor
            for name, tensor in decoder_of(model).state_dict().items()
            if name.startswith(wanted) or name == "norm.weight"
        }
    else:
        found = _read_decoder_tensors(files, wanted)
    for layer in wanted:
        if not any(name.startswith(layer) for name in found):
            raise ConfigError(
                f"target.model {table.model!r}: no tensors of decoder layer {layer!r} in its "
                f"files; choose layers that the target has"
            )
    return {name: tensor.to(device, dtype) for name, tensor in found.items()}


def _read_decoder_tensors(files: TargetFiles, wanted: tuple[str, ...]) -> dict[str, torch.Tensor]:
    places = _tensor_places(files)
    prefix = _decoder_prefix(files, places)
    names = {
        name.removeprefix(prefix): name
        for name in places
        if name.startswith(tuple(prefix + layer for layer in wanted))
        or name == f"{prefix}norm.weight"
    }
    return {short: _read_tensor(places, name) for short, name in names.items()}


def _read_safetensors_tables(files: TargetFiles) -> tuple[torch.Tensor, torch.Tensor | None]:
    places = _tensor_places(files)
    embedding = _read_tensor(places, f"{_decoder_prefix(files, places)}embed_tokens.weight")
    head_name = next((name for name in _HEAD_NAMES if name in places), None)
    if head_name is not None:
        # A tied config with two different tables in the files loads untied in transformers too.
        head = _read_tensor(places, head_name)
        return embedding, None if torch.equal(head, embedding) else head
    if not AutoConfig.from_pretrained(**files.source).get_text_config().tie_word_embeddings:
        raise ConfigError(
            f"target.model {str(files.path)!r}: no output head in its files (looked for "
            f"{', '.join(_HEAD_NAMES)}) though its config does not tie it to the embedding"
        )
    return embedding, None


def _tensor_places(files: TargetFiles) -> dict[str, Path]:
    """Return which file holds each tensor."""
    places: dict[str, Path] = {}
    for file in files.weight_files():
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file)
    return places


def _decoder_prefix(files: TargetFiles, places: dict[str, Path]) -> str:
    for prefix in _DECODER_PREFIXES:
        if f"{prefix}embed_tokens.weight" in places:
            return prefix
    raise ConfigError(
        f"target.model {str(files.path)!r}: no token embedding in its files (looked for "
        f"embed_tokens.weight behind {', '.join(map(repr, _DECODER_PREFIXES))})"
    )


def _read_tensor(places: dict[str, Path], name: str) -> torch.Tensor:
    with safe_open(places[name], framework="pt") as tensors:
        return tensors.get_tensor(name)


def _read_gguf_tables(files: TargetFiles) -> tuple[torch.Tensor, torch.Tensor | None]:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"target.model {str(files.path)!r} is a GGUF file; install the extra: "
            f"pip install 'ringdraft[gguf]'"
        ) from error
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(files.path).tensors}
    embedding = _dequantize(tensors["token_embd.weight"], gguf.dequantize)
    output = tensors.get("output.weight")
    return embedding, None if output is None else _dequantize(output, gguf.dequantize)


def _dequantize(tensor: Any, dequantize: Callable[..., Any]) -> torch.Tensor:
    values = dequantize(tensor.data, tensor.tensor_type)
    # GGUF lists dimensions innermost first.
    return torch.from_numpy(values.reshape([int(size) for size in reversed(tensor.shape)]).copy())
