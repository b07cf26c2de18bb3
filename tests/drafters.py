"""Small drafters and rows for tests."""

import torch

from common.drafters.dflash.config import FULL_ATTENTION, DrafterSpec
from common.drafters.dflash.initialise import random_init
from common.drafters.dflash.model import DFlashDrafter, Products, plain_products
from common.drafters.dflash.objective import StagedRow


def make_spec(**changes: object) -> DrafterSpec:
    """Return a tiny spec: GQA, head width unlike hidden / heads."""
    values: dict = {
        "num_layers": 2,
        "block_size": 4,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": 96,
        "sliding_window": 0,
        "loss_decay_gamma": 4.0,
    }
    values.update(changes)
    values.setdefault("layer_types", (FULL_ATTENTION,) * values["num_layers"])
    return DrafterSpec(**values)


def make_drafter(
    spec: DrafterSpec, seed: int = 0, products: Products = plain_products
) -> DFlashDrafter:
    """Return a drafter with weights large enough that every path matters."""
    drafter = DFlashDrafter(spec, products)
    random_init(drafter, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.mul_(8.0)
            assert torch.isfinite(parameter).all(), name
    return drafter


def make_row(
    spec: DrafterSpec,
    lengths: tuple[int, ...],
    num_tokens: int,
    seed: int = 0,
    num_prompt: int = 2,
    draw: tuple[int, int, int] = (1, 2, 0),
) -> StagedRow:
    """Return a packed row of documents of the given lengths, each with an unsupervised prompt."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, spec.vocab_size - 1, (num_tokens,), generator=generator)
    document_ids = torch.full((num_tokens,), -1)
    position_ids = torch.zeros(num_tokens, dtype=torch.int64)
    loss_mask = torch.zeros(num_tokens)
    start = 0
    for index, length in enumerate(lengths):
        document_ids[start : start + length] = index
        position_ids[start : start + length] = torch.arange(length)
        loss_mask[start + num_prompt : start + length] = 1
        start += length
    width = len(spec.target_layer_ids) * spec.hidden_size
    return StagedRow(
        token_ids=token_ids.to(torch.int32),
        document_ids=document_ids.to(torch.int32),
        position_ids=position_ids.to(torch.int32),
        loss_mask=loss_mask.to(torch.uint8),
        aux_hidden_states=torch.randn(num_tokens, width, generator=generator),
        draw=torch.tensor(draw),
        last_hidden_states_normed=torch.randn(num_tokens, spec.hidden_size, generator=generator),
    )


def make_tables(spec: DrafterSpec, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random embedding and head, [V, H] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (spec.vocab_size, spec.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
