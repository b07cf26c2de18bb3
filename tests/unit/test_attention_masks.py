"""The dense mask against loops over slots and keys."""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.attention import (
    UNBOUNDED_WINDOW,
    BlockLayout,
    LayerWindow,
    dense_mask,
    make_layout,
    sdpa,
)

LENGTHS = (23, 9, 40, 31)
WINDOWS = {"full": (UNBOUNDED_WINDOW, False), "narrow": (3, True), "wide": (20, True),
           "wide, not causal": (20, False)}  # fmt: skip


def layer(window: int, is_causal: bool) -> LayerWindow:
    return LayerWindow(torch.tensor(window, dtype=torch.int32), torch.tensor(is_causal))


def position_ids(lengths: tuple[int, ...], num_tokens: int) -> Tensor:
    parts = [torch.arange(length) for length in lengths]
    padding = torch.zeros(num_tokens - sum(lengths), dtype=torch.int64)
    return torch.cat([*parts, padding]).to(torch.int32)


def random_layout(
    num_anchors: int, block_size: int, num_tokens: int, lengths: tuple[int, ...] = LENGTHS
) -> tuple[BlockLayout, list[tuple[int, int] | None]]:
    """Return a layout and, by hand, (document start, anchor) of each block or None."""
    generator = torch.Generator().manual_seed(num_anchors + block_size)
    positions = position_ids(lengths, num_tokens)
    anchors = torch.randperm(sum(lengths), generator=generator)[:num_anchors].sort().values
    is_valid = torch.arange(num_anchors) < num_anchors - 2
    anchors = torch.where(is_valid, anchors, 0)
    by_hand = [
        (anchor - int(positions[anchor]), anchor) if valid else None
        for anchor, valid in zip(anchors.tolist(), is_valid.tolist(), strict=True)
    ]
    return make_layout(anchors, is_valid, positions, block_size), by_hand


def mask_by_hand(
    blocks: list[tuple[int, int] | None], layout: BlockLayout, window: int, is_causal: bool
) -> Tensor:
    """Follow the rules one pair at a time."""
    size, num_context = layout.block_size, layout.num_context
    num_queries = len(blocks) * size
    mask = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for index, block in enumerate(blocks):
        for slot in range(size):
            row = mask[index * size + slot]
            for other in range(size):  # own block, invalid ones too
                in_window = slot - other < window
                row[num_context + index * size + other] = in_window and (
                    other <= slot or not is_causal
                )
            if block is not None:
                start, anchor = block
                for key in range(start, anchor):
                    row[key] = anchor + slot - key < window
    return mask


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("block_size", [4, 5, 7, 16])
def test_dense_mask_equals_the_rules_followed_by_hand(kind: str, block_size: int) -> None:
    window, is_causal = WINDOWS[kind]
    layout, blocks = random_layout(12, block_size, num_tokens=110)
    expected = mask_by_hand(blocks, layout, window, is_causal)
    assert torch.equal(dense_mask(layout, layer(window, is_causal)), expected)


def test_slots_see_no_feature_at_or_past_their_anchor_and_no_other_document() -> None:
    layout, blocks = random_layout(12, 6, num_tokens=110)
    seen = dense_mask(layout, layer(UNBOUNDED_WINDOW, is_causal=False))[:, :110]
    for index, block in enumerate(blocks):
        rows = seen[index * 6 : index * 6 + 6]
        start, anchor = block or (0, 0)
        assert rows[:, start:anchor].all()
        assert not rows[:, anchor:].any()
        assert not rows[:, :start].any()


def test_window_of_a_published_drafter_reaches_back_w_minus_one_from_the_slot() -> None:
    positions = torch.arange(20, dtype=torch.int32)
    layout = make_layout(torch.tensor([10]), torch.tensor([True]), positions, block_size=4)
    seen = dense_mask(layout, layer(4, is_causal=True))
    assert seen[0, :20].nonzero().flatten().tolist() == [7, 8, 9]
    assert seen[2, :20].nonzero().flatten().tolist() == [9]
    assert seen[2, 20:].tolist() == [True, True, True, False]


def test_every_row_sees_something_so_that_no_softmax_is_empty() -> None:
    layout, _ = random_layout(12, 5, num_tokens=110)
    for window, is_causal in WINDOWS.values():
        mask = dense_mask(layout, layer(window, is_causal))
        assert mask.any(-1).all()
        q, k = torch.randn(2, 60, 8), torch.randn(1, 170, 8)
        assert torch.isfinite(sdpa(q, k, k, mask)).all()
