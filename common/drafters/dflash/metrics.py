"""Figures of a step as sums on the device, and acceptance as decoding would count it.

Sums leave the step in one float32 vector; division comes after all reductions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SCALARS = 5


def pack_sums(
    loss: Tensor,  # [] float32, sum of weighted losses
    weights: Tensor,  # [A, S-1] float32
    is_correct: Tensor,  # [A, S-1] bool
    is_supervised: Tensor,  # [A, S-1] bool
    num_dropped: Tensor,  # [] blocks that found no room
) -> Tensor:
    """Return [5 + 2 (S-1)] float32: loss, weight, prefix, block and dropped sums, then correct and
    supervised counts a slot."""
    right = is_correct & is_supervised
    prefix = right.to(torch.float32).cumprod(-1).sum()
    blocks = is_supervised[:, 0].sum().to(torch.float32)
    scalars = torch.stack([loss.detach(), weights.sum(), prefix, blocks, num_dropped.float()])
    return torch.cat([scalars, right.sum(0).float(), is_supervised.sum(0).float()])


@dataclass(frozen=True)
class StepFigures:
    """Ratios of packed sums, after all reductions."""

    loss: float
    """Weighted mean of the slots' loss: nats, but for total variation."""
    acceptance_rate_at: tuple[float, ...]
    """Teacher-forced accuracy of each draft slot; a rate of its own, not of decoding."""
    accepted_prefix_length: float
    """Mean length of the all-correct prefix a block, bonus excluded."""
    num_blocks: int
    """Blocks with at least one supervised slot."""
    num_dropped_blocks: int
    """Blocks whose rows the head had no room for: drafter.head_rows."""


def unpack_sums(sums: Sequence[float]) -> StepFigures:
    """Divide packed sums (any number of rows added together)."""
    loss, weight, prefix, blocks, dropped = sums[:NUM_SCALARS]
    num_slots = (len(sums) - NUM_SCALARS) // 2
    right = sums[NUM_SCALARS : NUM_SCALARS + num_slots]
    supervised = sums[NUM_SCALARS + num_slots :]
    return StepFigures(
        loss=loss / weight if weight else 0.0,
        acceptance_rate_at=tuple(
            r / n if n else 0.0 for r, n in zip(right, supervised, strict=True)
        ),
        accepted_prefix_length=prefix / blocks if blocks else 0.0,
        num_blocks=int(blocks),
        num_dropped_blocks=int(dropped),
    )


def replay_passes(prefix_lengths: Tensor, last: Tensor) -> Tensor:
    """Return how many target passes it takes from each position to the end of its text, [T] int64.

    `replay_walk` for all positions at once, on the device and without a sync: by doubling, each round
    makes steps of twice as many passes.

    Args:
        prefix_lengths: [T] int64, right draft tokens with the anchor at a position.
        last: [T] int64, the last position of the text that a position is in; its own where in none.
    """
    position = torch.arange(len(last), device=last.device)
    jump = torch.minimum(position + prefix_lengths + 1, last)
    passes = (position < last).to(torch.int64)
    for _ in range(len(last).bit_length()):
        passes = passes + passes[jump]
        jump = jump[jump]
    return passes


def replay_walk(prefix_lengths: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that each target pass would emit over a text the target wrote greedily.

    `prefix_lengths[i]` is the number of right draft tokens with the anchor at answer token i. The
    walk starts at token 0, steps by prefix + 1 as decoding does, and ends with the text. At T=0 it
    equals live decoding up to float ties.
    """
    emitted: list[int] = []
    position = 0
    while position < num_tokens - 1:
        emitted.append(min(prefix_lengths[position] + 1, num_tokens - 1 - position))
        position += emitted[-1]
    return emitted
