"""The Triton kernel behind the gradient norm of `optim`; import it there alone, where there is a GPU.

One pass over the gradients, 2 or 4 bytes a value: each program leaves the sum of squares of its tile, and
a sum of these follows. No atomics, so that the same gradients have the same norm.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _BLOCK, _NUM_WARPS = 32768, 4096, 8


def square_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares [] float32 of contiguous tensors; launches on the current stream."""
    counts = [triton.cdiv(gradient.numel(), _TILE) for gradient in gradients]
    parts = torch.empty(sum(counts), dtype=torch.float32, device=gradients[0].device)
    starts = itertools.accumulate(counts, initial=0)
    with torch.cuda.device(parts.device):
        for gradient, count, start in zip(gradients, counts, starts, strict=False):
            _square_sums[(count,)](
                gradient, parts[start:], gradient.numel(),
                TILE=_TILE, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip
    return parts.sum()


@triton.jit
def _square_sums(
    gradient_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    size: tl.int32,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    begin = tl.program_id(0).to(tl.int64) * TILE
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, TILE, BLOCK):
        place = begin + offset + tl.arange(0, BLOCK)
        g = tl.load(gradient_ptr + place, mask=place < size, other=0.0).to(tl.float32)
        total += g * g
    tl.store(parts_ptr + tl.program_id(0), tl.sum(total, 0))
