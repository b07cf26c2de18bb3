"""Who sees whom: the anchored-block mask, dense for SDPA and in tables for flex_attention.

Queries are the Q = A * S block slots. Keys are the T context tokens of the row, then the same Q
slots. A slot sees the context of its own document strictly before its anchor, and its own block;
sliding layers see back W positions from the slot and are causal inside the block, as in serving.
An invalid block sees itself alone, so that no row of the softmax is empty.

Both forms come from `is_visible`. Windows are 0-dim device tensors: one graph serves all layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MASK_TILE = 128
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


def block_tables(layout: BlockLayout, layer: LayerWindow) -> Any:
    """Return the flex_attention BlockMask of a layer, built from the anchors on the device.

    A tile of queries meets a tile of keys where their intervals overlap, so block sizes that do
    not divide the tile work. Tiles are marked full only where every slot sees every key of it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_queries = len(layout.context_stop) * layout.block_size
    num_keys = layout.num_context + num_queries
    partial, full = _tiles(layout, layer, num_queries, num_keys)
    kv_num, kv_index = _compact(partial)
    full_num, full_index = _compact(full)
    q_num, q_index = _compact(partial.transpose(0, 1))
    full_q_num, full_q_index = _compact(full.transpose(0, 1))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return is_visible(layout, layer, query, key)

    return BlockMask(
        seq_lengths=(num_queries, num_keys),
        kv_num_blocks=kv_num,
        kv_indices=kv_index,
        full_kv_num_blocks=full_num,
        full_kv_indices=full_index,
        q_num_blocks=q_num,
        q_indices=q_index,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_index,
        BLOCK_SIZE=(MASK_TILE, MASK_TILE),
        mask_mod=mask_mod,
    )


def _tiles(
    layout: BlockLayout, layer: LayerWindow, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Return which (query tile, key tile) pairs are partly and wholly visible, bool [Qt, Kt]."""
    device = layout.context_stop.device
    slots = torch.arange(-(-num_queries // MASK_TILE) * MASK_TILE, device=device, dtype=torch.int32)
    is_slot = slots < num_queries
    slots = slots.clamp_max(num_queries - 1)
    block, slot = slots // layout.block_size, slots % layout.block_size
    stop = layout.context_stop[block]
    low = torch.maximum(layout.context_start[block], stop + slot - (layer.window - 1))
    tile_start = torch.arange(0, num_keys, MASK_TILE, device=device, dtype=torch.int32)[None]
    tile_stop = (tile_start + MASK_TILE).clamp_max(num_keys)

    def meets(first: Tensor, last: Tensor) -> Tensor:
        overlap = torch.minimum(last[:, None], tile_stop) > torch.maximum(
            first[:, None], tile_start
        )
        return overlap & is_slot[:, None]

    own = layout.num_context + block * layout.block_size
    touched = meets(low, stop) | meets(own, own + layout.block_size)
    covered = (
        (low[:, None] <= tile_start) & (stop[:, None] >= tile_start + MASK_TILE) & is_slot[:, None]
    )
    num_key_tiles = tile_start.shape[1]
    touched = touched.view(-1, MASK_TILE, num_key_tiles).any(1)
    covered = covered.view(-1, MASK_TILE, num_key_tiles).all(1)
    return touched & ~covered, covered


def _compact(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return per row the count and the indices of True columns, full width, without a sort."""
    num_columns = tiles.shape[-1]
    dense = tiles.to(torch.int32)
    count = dense.sum(-1, dtype=torch.int32)
    rank = torch.cumsum(dense, -1, dtype=torch.int32) - 1
    place = torch.where(tiles, rank, num_columns).to(torch.int64)
    source = torch.arange(num_columns, dtype=torch.int32, device=tiles.device).expand(tiles.shape)
    empty = torch.zeros(*tiles.shape[:-1], num_columns + 1, dtype=torch.int32, device=tiles.device)
    index = empty.scatter(-1, place, source)[..., :num_columns]
    return count[None, None].contiguous(), index[None, None].contiguous()
