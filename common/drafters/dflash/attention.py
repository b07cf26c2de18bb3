"""Who sees whom: the anchored-block mask, and attention under it as a dense matrix.

Queries are the Q = A * S block slots. Keys are the T context tokens of the row, then the same Q
slots. A slot sees the context of its own document strictly before its anchor, and its own block;
sliding layers see back W positions from the slot and are causal inside the block, as in serving.
An invalid block sees itself alone, so that no row of the softmax is empty.

`is_visible` is what every other form of attention must agree with. Windows are 0-dim device tensors:
one graph serves all layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

UNBOUNDED_WINDOW = 1 << 30


class BlockLayout(NamedTuple):
    """Where the blocks of a row attend; all tensors on the device."""

    context_start: Tensor  # [A] int32: first visible context index
    context_stop: Tensor  # [A] int32: the anchor, exclusive; equals start where invalid
    num_context: int  # T
    block_size: int  # S


class LayerWindow(NamedTuple):
    """What distinguishes layers; 0-dim device tensors."""

    window: Tensor  # int32: W, or UNBOUNDED_WINDOW
    is_causal: Tensor  # bool


def make_layout(
    anchors: Tensor,  # [A] int64
    is_valid: Tensor,  # [A] bool
    position_ids: Tensor,  # [T] int32, from 0 in each document
    block_size: int,
) -> BlockLayout:
    """Return the layout of a row; a document starts at anchor - position of the anchor."""
    stop = torch.where(is_valid, anchors, 0)
    start = torch.where(is_valid, anchors - position_ids[anchors], 0)
    return BlockLayout(start.to(torch.int32), stop.to(torch.int32), len(position_ids), block_size)


def is_visible(layout: BlockLayout, layer: LayerWindow, query: Tensor, key: Tensor) -> Tensor:
    """Return bool for pairs of a query slot index and a key index (tensors that broadcast)."""
    block, slot = query // layout.block_size, query % layout.block_size
    stop = layout.context_stop[block]
    lowest = torch.maximum(layout.context_start[block], stop + slot - (layer.window - 1))
    in_context = (key < stop) & (key >= lowest)
    other = key - layout.num_context
    other_slot = other - block * layout.block_size
    in_block = (other_slot >= 0) & (other_slot < layout.block_size)
    in_block = in_block & ((other_slot <= slot) | ~layer.is_causal)
    in_block = in_block & (other_slot > slot - layer.window)
    return in_context | in_block


def dense_mask(layout: BlockLayout, layer: LayerWindow) -> Tensor:
    """Return [Q, K] bool, True where a slot sees a key."""
    num_queries = len(layout.context_stop) * layout.block_size
    device = layout.context_stop.device
    query = torch.arange(num_queries, device=device, dtype=torch.int32)[:, None]
    key = torch.arange(layout.num_context + num_queries, device=device, dtype=torch.int32)[None]
    return is_visible(layout, layer, query, key)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with a dense mask. q [n_h, Q, d]; k, v [n_kv, K, d]; mask [Q, K]; -> [n_h, Q, d]."""
    repeats = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)
    return out[0]
