"""Anchors of a row, drawn on the device by an integer hash: no generator state, no host sync.

The same (seed, sequence, visit) gives the same anchors on every device, worker and resume. Shapes
are fixed: A positions come out for every row, sorted, the invalid ones last.

T tokens of a row, A anchors, D documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_U32 = 0xFFFFFFFF
# Priority classes lie far above the 32 hash bits and the position bits that make keys unique.
_POSITION_BITS = 20
_LATER = 1 << 54
_NEVER = 1 << 60


class Anchors(NamedTuple):
    """Chosen anchors of one row."""

    positions: Tensor  # [A] int64, index into the row; 0 where invalid
    is_valid: Tensor  # [A] bool


def eligible_positions(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Return [T] bool: this position and the next are supervised and in one document."""
    supervised = (loss_mask != 0) & (document_ids >= 0)
    following = torch.roll(supervised, -1) & (torch.roll(document_ids, -1) == document_ids)
    following = following & (
        torch.arange(len(loss_mask), device=loss_mask.device) < len(loss_mask) - 1
    )
    return supervised & following


def select_anchors(
    loss_mask: Tensor,  # [T] uint8
    document_ids: Tensor,  # [T] int32, -1 on padding
    draw: Tensor,  # [3] int64: seed, sequence, visit
    num_anchors: int,
    max_documents: int,
) -> Anchors:
    """Choose up to A eligible positions; each document gets one before any gets two."""
    eligible = eligible_positions(loss_mask, document_ids)
    keys = _position_keys(len(loss_mask), draw, loss_mask.device)
    keys = torch.where(eligible, keys, _NEVER)
    bucket = document_ids.clamp_min(0).to(torch.int64)
    lowest = torch.full((max_documents,), _NEVER, dtype=torch.int64, device=keys.device)
    lowest = lowest.scatter_reduce(0, bucket, keys, reduce="amin")
    is_first = eligible & (keys == lowest[bucket])
    keys = torch.where(is_first | ~eligible, keys, keys + _LATER)
    padded = torch.nn.functional.pad(keys, (0, max(0, num_anchors - len(keys))), value=_NEVER)
    values, indices = torch.topk(padded, num_anchors, largest=False, sorted=False)
    is_valid = values < _NEVER
    order = torch.where(is_valid, indices, len(padded)).sort().values
    is_valid = order < len(padded)
    return Anchors(positions=torch.where(is_valid, order, 0), is_valid=is_valid)


def _position_keys(num_tokens: int, draw: Tensor, device: torch.device) -> Tensor:
    """Return [T] int64 unique keys: 32 hash bits, then the position."""
    state = torch.zeros((), dtype=torch.int64, device=device)
    for part in (draw[0], draw[1], draw[2]):
        state = _mix(state * 31 + part)
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device)
    # Exclusive or with loaded values first: Inductor keeps products of a bare arange in 32 bits.
    state = _mix(_mix(state ^ positions))
    return (state << _POSITION_BITS) | positions


def _mix(state: Tensor) -> Tensor:
    """Spread 32 bits (the finaliser constants of MurmurHash3); int64 products wrap, and the low
    32 bits of a wrapped product are right."""
    state = (state + 0x7F4A7C15) & _U32
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _U32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _U32
    return state ^ (state >> 16)
