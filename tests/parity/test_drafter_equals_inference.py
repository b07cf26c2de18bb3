"""Training mask and positions give, block by block, what the published inference code computes."""

import json

import pytest
import torch

from common.drafters.dflash.anchors import select_anchors
from common.drafters.dflash.attention import make_layout
from common.drafters.dflash.checkpoint import drafter_config
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterSpec
from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.model import DFlashDrafter
from common.drafters.dflash.objective import (
    DFlashObjective,
    StagedRow,
    block_inputs,
    block_positions,
)
from tests.drafters import make_drafter, make_row, make_spec, make_tables

dflash_model = pytest.importorskip("dflash.model", reason="oracle dflash 0.1.0 is not installed")

LAYER_MIXES = {
    "full": (FULL_ATTENTION, FULL_ATTENTION, FULL_ATTENTION),
    "sliding": (SLIDING_ATTENTION, SLIDING_ATTENTION, SLIDING_ATTENTION),
    "mixed": (SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION),
}


SHAPES = {
    "a head each": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 16},
    "one key head": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8},
    "heads wider than hidden": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32},
    "one feature": {"target_layer_ids": (4,)},
}
# Positions that a verified block adds: the anchor and what was accepted behind it.
ROUNDS = (1, 4, 2, 3, 1, 4, 4, 1)


def oracle(drafter: DFlashDrafter) -> torch.nn.Module:
    config = json.loads(json.dumps(drafter_config(drafter.spec)))
    config["dtype"] = "float32"
    model = dflash_model.DFlashDraftModel(dflash_model.Qwen3Config(**config))
    model.load_state_dict(drafter.state_dict(), strict=True)
    return model.eval()


def training_blocks(
    drafter: DFlashDrafter, row: StagedRow, embedding: torch.Tensor, num_anchors: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spec = drafter.spec
    objective = DFlashObjective(
        drafter, embedding=embedding, head=embedding, num_anchors=num_anchors,
        max_documents=8, loss_chunk_rows=16, backend="dense",
    )  # fmt: skip
    anchors, is_valid = select_anchors(row.loss_mask, row.document_ids, row.draw, num_anchors, 8)
    layout = make_layout(anchors, is_valid, row.position_ids, spec.block_size)
    final = drafter(
        row.aux_hidden_states,
        row.position_ids,
        block_inputs(embedding, row.token_ids[anchors], spec),
        block_positions(row.position_ids[anchors], spec.block_size),
        objective.attends(layout),
    )
    return anchors, is_valid, final.view(num_anchors, spec.num_draft_tokens, -1)


def noise_embedding(embedding: torch.Tensor, token: int, spec: DrafterSpec) -> torch.Tensor:
    """Return a block's input as published code takes it, [1, S, H]."""
    return embedding[[token] + [spec.mask_token_id] * (spec.block_size - 1)][None]


def spec_with(mix: str, window: int = 6, **changes: object) -> DrafterSpec:
    layer_types = LAYER_MIXES[mix]
    window = window if SLIDING_ATTENTION in layer_types else 0
    return make_spec(
        num_layers=len(layer_types), layer_types=layer_types, sliding_window=window, **changes
    )


@pytest.mark.parametrize("mix", LAYER_MIXES)
@pytest.mark.parametrize("block_size", [4, 5, 16])
def test_training_forward_equals_published_inference_per_block(mix: str, block_size: int) -> None:
    check_blocks(spec_with(mix, block_size=block_size))


@pytest.mark.parametrize("mix", LAYER_MIXES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_does_for_every_grouping_of_heads_and_features(mix: str, shape: str) -> None:
    check_blocks(spec_with(mix, **SHAPES[shape]))


@pytest.mark.parametrize("mix", ["sliding", "mixed"])
@pytest.mark.parametrize("window", [1, 2, 3, 22, 100])
def test_it_does_for_windows_shorter_than_a_block_and_longer_than_a_document(
    mix: str, window: int
) -> None:
    check_blocks(spec_with(mix, window=window, block_size=5))


def check_blocks(spec: DrafterSpec) -> None:
    """Compare overlapping blocks of a packed row with published inference behind each anchor."""
    block_size = spec.block_size
    drafter = make_drafter(spec)
    embedding, _ = make_tables(spec)
    row = make_row(spec, (23, 9, 14), num_tokens=64)
    anchors, is_valid, final = training_blocks(drafter, row, embedding, num_anchors=24)
    assert is_valid.all()
    assert (anchors.diff() < block_size).any(), "overlapping blocks are part of the claim"
    published = oracle(drafter)
    for index, anchor in enumerate(anchors.tolist()):
        start = anchor - int(row.position_ids[anchor])
        expected = published(
            position_ids=torch.arange(anchor - start + block_size)[None],
            noise_embedding=noise_embedding(embedding, int(row.token_ids[anchor]), spec),
            target_hidden=row.aux_hidden_states[None, start:anchor],
        )
        torch.testing.assert_close(final[index], expected[0, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", LAYER_MIXES)
def test_incremental_context_equals_published_inference(mix: str) -> None:
    spec = spec_with(mix)
    drafter = make_drafter(spec)
    embedding, head = make_tables(spec)
    features = torch.randn(20, len(spec.target_layer_ids) * spec.hidden_size)
    context = DraftContext(drafter.eval(), embedding, head)
    published = oracle(drafter)
    for start, stop in ((0, 7), (7, 8), (8, 12), (12, 20)):
        context.append(features[start:stop])
        token = torch.tensor([stop % 11])
        got = context.final_hidden_states(token, torch.tensor([stop]))
        expected = published(
            position_ids=torch.arange(stop + spec.block_size)[None],
            noise_embedding=noise_embedding(embedding, int(token), spec),
            target_hidden=features[None, :stop],
        )[0, 1:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", LAYER_MIXES)
def test_incremental_context_equals_published_cache_with_crops_and_recomputation(mix: str) -> None:
    spec = spec_with(mix)
    drafter = make_drafter(spec)
    embedding, head = make_tables(spec)
    features = torch.randn(6 + sum(ROUNDS), len(spec.target_layer_ids) * spec.hidden_size)
    context = DraftContext(drafter.eval(), embedding, head)
    published = oracle(drafter)
    cache = dflash_model._make_cache(published.config)
    seen, start = 0, 6  # a prompt of six tokens, then the rounds
    for token, accepted in enumerate(ROUNDS):
        block = noise_embedding(embedding, token, spec)
        cached = published(
            position_ids=torch.arange(seen, start + spec.block_size)[None],
            noise_embedding=block,
            target_hidden=features[None, seen:start],
            past_key_values=cache,
            use_cache=True,
        )[0, 1:]
        dflash_model._crop_to(cache, start)  # what the block has left there
        afresh = published(
            position_ids=torch.arange(start + spec.block_size)[None],
            noise_embedding=block,
            target_hidden=features[None, :start],
        )[0, 1:]
        context.append(features[seen:start])
        got = context.final_hidden_states(torch.tensor([token]), torch.tensor([start]))
        torch.testing.assert_close(got, afresh, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got, cached, rtol=1e-4, atol=1e-5)
        assert context.num_tokens == start, "nothing of a block is kept"
        seen, start = start, start + accepted


def test_blocks_proposed_at_once_equal_blocks_proposed_one_by_one() -> None:
    spec = spec_with("mixed")
    drafter = make_drafter(spec).eval()
    embedding, head = make_tables(spec)
    features = torch.randn(20, len(spec.target_layer_ids) * spec.hidden_size)
    context = DraftContext(drafter, embedding, head)
    context.append(features)
    tokens, anchors = torch.tensor([3, 4, 5]), torch.tensor([5, 6, 20])
    together = context.propose(tokens, anchors)
    for index in range(3):
        alone = context.propose(tokens[index : index + 1], anchors[index : index + 1])
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-4)
