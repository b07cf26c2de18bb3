"""What does float8 take from the hidden states of a real target, and would a finer scale keep it?

    python -m benchmarks.float8_error --config examples/smollm2/demo.toml [--rows 64] [--json]

Runs the target of a config over its first rows and compares what a drafter gets out of a row with
what the target computed: rows in bfloat16, rows in float8 as they are (one scale a token), and
float8 with a scale for each token and layer, which rows do not have. One line for each, then one
for each layer with the size of its values. Errors are relative norms of differences.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from common.config.loading import load
from common.float8 import dequantise, quantise
from common.target.features import FeatureTap, run_packed
from common.target.loading import (
    describe_target,
    load_target,
    load_tokenizer,
    resolve_target_layer_ids,
)
from services.target_server.config import TargetServerConfig
from services.target_server.conversations import Conversations
from services.target_server.row_stream import RowStream

Form = Callable[[Tensor], Tensor]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = load(TargetServerConfig, options.config, options.settings)
    layer_ids, features, positions = capture(config, options.rows)
    for line in [*errors(features), *layers(layer_ids, features, positions == 0)]:
        print(json.dumps(line) if options.json else "  ".join(f"{k} {v}" for k, v in line.items()))


def capture(config: TargetServerConfig, num_rows: int) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Return the layer ids, the features [N, L, H] of the first rows, and positions [N]."""
    tokenizer = load_tokenizer(config.target)
    kwargs = config.target.chat_template_kwargs
    conversations = Conversations(config.data, tokenizer, kwargs, config.run.seed)
    ids = resolve_target_layer_ids(config.target, describe_target(config.target).num_layers)
    model = load_target(config.target, config.run.device)
    features, positions = [], []
    with FeatureTap(model, ids) as tap:
        for row in islice(RowStream(conversations, config.data).rows(), num_rows):
            tokens, places = (
                torch.from_numpy(array[: row.used_tokens]).to(config.run.device)
                for array in (row.token_ids, row.position_ids)
            )
            features.append(run_packed(model, tap, tokens, places).float().clone())
            positions.append(places)
    return ids, torch.cat(features).unflatten(1, (len(ids), -1)), torch.cat(positions)


def errors(features: Tensor) -> Iterator[dict[str, object]]:
    """Compare each form of a row with the features, over all layers at once."""
    forms = {"bf16": in_bfloat16, "fp8": in_float8, "fp8 with a scale a layer": by_layer}
    x = features.flatten(1)
    for name, form in forms.items():
        got = form(features).flatten(1)
        cosines = cosine_similarity(got, x, dim=-1)
        yield {
            "row": name,
            "error": round(relative(got, x).item(), 5),
            "token_error_mean": round(relative(got, x, dim=-1).mean().item(), 5),
            "token_error_max": round(relative(got, x, dim=-1).max().item(), 5),
            "cosine_median": round(cosines.median().item(), 6),
            "cosine_min": round(cosines.min().item(), 6),
            "lost_to_zero": round(((got == 0) & (x != 0)).float().mean().item(), 6),
        }


def layers(
    layer_ids: tuple[int, ...], features: Tensor, is_first: Tensor
) -> Iterator[dict[str, object]]:
    """Describe each layer; a document's first token is where massive activations are."""
    got, finer = in_float8(features), by_layer(features)
    for index, layer in enumerate(layer_ids):
        x = features[:, index]
        token_errors = relative(got[:, index], x, dim=-1)
        yield {
            "layer": layer,
            "rms_median": round(x.square().mean(-1).sqrt().median().item(), 2),
            "largest_median": round(x.abs().amax(-1).median().item(), 1),
            "largest": round(x.abs().max().item(), 1),
            "error": round(relative(got[:, index], x).item(), 5),
            "token_error_mean": round(token_errors.mean().item(), 5),
            "token_error_max": round(token_errors.max().item(), 5),
            "first_tokens_error_max": round(token_errors[is_first].max().item(), 5),
            "scale_a_layer_error": round(relative(finer[:, index], x).item(), 5),
            "scale_a_layer_token_error_max": round(
                relative(finer[:, index], x, dim=-1).max().item(), 5
            ),
        }


def relative(got: Tensor, x: Tensor, dim: int | None = None) -> Tensor:
    """Return the norm of the difference over the norm, of all or along a dimension."""
    return torch.linalg.vector_norm(got - x, dim=dim) / torch.linalg.vector_norm(x, dim=dim)


def in_bfloat16(features: Tensor) -> Tensor:
    """Return the features as rows in bfloat16 hold them."""
    return features.to(torch.bfloat16).float()


def in_float8(features: Tensor) -> Tensor:
    """Return the features as rows in float8 hold them."""
    wide = features.flatten(1)
    values = torch.empty_like(wide, dtype=torch.float8_e4m3fn)
    scales = wide.new_empty(len(wide))
    out = torch.empty_like(wide)
    quantise(wide, values, scales)
    dequantise(values, scales, out)
    return out.view_as(features)


def by_layer(features: Tensor) -> Tensor:
    """Return the features as float8 with a scale for each token and layer would hold them."""
    flat = features.flatten(0, 1)
    return in_float8(flat[:, None]).view_as(features)


if __name__ == "__main__":
    main()
