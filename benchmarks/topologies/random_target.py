"""A target of any size with random weights, as a folder that every service can load.

Its cost is that of a real model of the shape; what it writes means nothing, so a drafter trained on it
is of no use. The tokenizer and the chat template are those of another model.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from common.config.shared import TargetTable
from common.target.loading import load_tokenizer

_STANDARD_DEVIATION = 0.02
_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class TargetShape:
    """A dense target's sizes, and the rows that suit it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    row_tokens: int
    num_anchors: int
    drafter_layers: int = 5
    block_size: int = 16


SHAPES = {
    "qwen3-8b": TargetShape(4096, 36, 32, 8, 128, 12288, 151936, 4096, 512),
    # The same rows and drafter from a target that costs a quarter: workers are the slower side.
    "qwen3-8b-shallow": TargetShape(4096, 8, 32, 8, 128, 12288, 151936, 4096, 512),
    "27b-like": TargetShape(5120, 64, 40, 8, 128, 17408, 248320, 4096, 512),
    "tiny": TargetShape(64, 8, 4, 2, 16, 128, 49280, 256, 16, drafter_layers=1, block_size=4),
}


def write_target(folder: Path, shape: TargetShape, tokenizer_of: Path, device: str) -> Path:
    """Write config, tokenizer and bfloat16 weights into `folder`, unless they are there already."""
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    load_tokenizer(TargetTable(model=str(tokenizer_of))).save_pretrained(folder)
    config = Qwen3Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            n: t.shape for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    _write_weights(folder, shapes, device)
    return folder


def _write_weights(folder: Path, shapes: dict[str, torch.Size], device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0
    for name, shape in shapes.items():
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        is_norm = len(shape) == 1
        shard[name] = (
            values.fill_(1.0)
            if is_norm
            else values.normal_(0, _STANDARD_DEVIATION, generator=generator)
        )
        held += values.nbytes
        total += values.nbytes
        if held >= _SHARD_BYTES or name == list(shapes)[-1]:
            file = f"model-{len(set(places.values())):05d}.safetensors"
            save_file(
                {key: tensor.cpu() for key, tensor in shard.items()},
                folder / file,
                {"format": "pt"},
            )
            places |= dict.fromkeys(shard, file)
            shard, held = {}, 0
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
