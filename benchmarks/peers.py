"""A peer's drafter step on the rows of `drafter_step`, in a process of its own.

    python -m benchmarks.peers specforge|specforge_liger --shape S --window W --anchors A

Needs `pip install --no-deps specforge==0.2.0 liger-kernel==0.8.5`. Prints a JSON line once it is warm,
then the median milliseconds of some steps for each line on standard input. The peer trains as its own
recipe does: bfloat16 parameters and optimizer states, torch's fused AdamW, a clip of 1.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable

import torch

from benchmarks.drafter_step import NUM_ROWS, SHAPES, make_rows, make_spec, median_ms
from common.drafters.dflash.config import DrafterSpec

PEERS = ("specforge", "specforge_liger")
_WARM_UP, _STEPS = 6, 10


def specforge_model(
    spec: DrafterSpec, anchors: int, *, liger: bool, device: torch.device
) -> torch.nn.Module:
    """Return SpecForge's online DFlash model with its drafter, in bfloat16; its tables are frozen."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels

    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    with device:
        draft = DFlashDraftModel(
            _config(spec, backend), load_liger_dflash_kernels() if liger else None
        )
        head = torch.nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        embedding = torch.nn.Embedding(spec.vocab_size, spec.hidden_size)
    for module in (draft, head, embedding):
        module.to(torch.bfloat16)
    head.requires_grad_(False)
    embedding.requires_grad_(False)
    return OnlineDFlashModel(
        draft, head, embedding, spec.mask_token_id, block_size=spec.block_size, num_anchors=anchors,
        loss_decay_gamma=spec.loss_decay_gamma, attention_backend=backend,
    )  # fmt: skip


def specforge_step(spec: DrafterSpec, anchors: int, *, liger: bool) -> Callable[..., None]:
    """Return SpecForge's online DFlash step: (token ids, features, loss mask) of one row."""
    model = specforge_model(spec, anchors, liger=liger, device=torch.device("cuda"))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step(token_ids: torch.Tensor, features: torch.Tensor, loss_mask: torch.Tensor) -> None:
        loss, *_ = model(token_ids, features, loss_mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _config(spec: DrafterSpec, attention: str) -> object:
    """Return the drafter's config as SpecForge reads it."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    config = Qwen3Config(
        hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, vocab_size=spec.vocab_size, num_hidden_layers=spec.num_layers,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope_parameters["rope_theta"], rms_norm_eps=spec.rms_norm_eps,
        use_sliding_window=bool(spec.sliding_window), sliding_window=spec.sliding_window or None,
        layer_types=list(spec.layer_types),
    )  # fmt: skip
    config.block_size = spec.block_size
    config.num_target_layers = spec.num_target_layers
    config.dflash_config = {
        "mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids),
    }  # fmt: skip
    config._attn_implementation = attention  # noqa: SLF001 - as SpecForge's own trainer sets it
    return config


def main() -> None:
    """Warm the peer up, then time it as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--anchors", type=int, default=0)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    spec = make_spec(shape, options.window)
    peer = specforge_step(
        spec, options.anchors or shape.anchors, liger=options.peer == "specforge_liger"
    )
    rows = [
        (row.token_ids.long()[None], row.aux_hidden_states[None], row.loss_mask.float()[None])
        for row in make_rows(shape, spec)
    ]
    numbers = itertools.count()

    def step() -> None:
        peer(*rows[next(numbers) % NUM_ROWS])

    for _ in range(_WARM_UP):
        step()
    torch.cuda.synchronize()
    print(json.dumps({"peak_gib": torch.cuda.max_memory_allocated() / 2**30}), flush=True)
    for _ in sys.stdin:
        print(median_ms(step, _STEPS), flush=True)


if __name__ == "__main__":
    main()
