"""The Triton kernels behind `muon.MuonRule`; import them there alone, where there is a GPU.

Two passes a matrix around its products: gradient and momentum into the momentum and what is to be made
orthogonal; that and the master into the master and the working weight. Scalars are read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_NUM_WARPS = 8


def advance_in_place(
    momentum: Tensor,  # [r, c] float32
    gradient: Tensor,  # [r, c] bfloat16 or float32
    update: Tensor,  # [r, c] bfloat16; filled
    scale: Tensor,  # [] float32
    is_bad: Tensor,  # [] bool; if set the momentum stays and the update is zeros
    mu: float,
) -> None:
    """Launch on the current stream; all tensors contiguous."""
    size = momentum.numel()
    with torch.cuda.device(momentum.device):
        _advance[(triton.cdiv(size, _BLOCK),)](
            momentum, gradient, update, scale, is_bad, size, mu,
            BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip


def move_in_place(
    master: Tensor,  # [r, c] float32
    working: Tensor,  # [r, c]; the master itself where the network computes in float32
    update: Tensor,  # [r, c] bfloat16
    kept: Tensor,  # [] float32, what decay leaves of the master
    step: Tensor,  # [] float32
    is_bad: Tensor,  # [] bool; if set nothing is written
) -> None:
    """Launch on the current stream; all tensors contiguous."""
    size = master.numel()
    with torch.cuda.device(master.device):
        _move[(triton.cdiv(size, _BLOCK),)](
            master, working, update, kept, step, is_bad, size,
            BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _advance(
    momentum_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    update_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    is_bad_ptr: tl.tensor,
    size: tl.int32,
    mu: tl.float32,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if tl.load(is_bad_ptr):
        zeros = tl.zeros([BLOCK], update_ptr.dtype.element_ty)
        tl.store(update_ptr + place, zeros, mask=inside)
    else:
        scale = tl.load(scale_ptr)
        g = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
        m = tl.load(momentum_ptr + place, mask=inside, other=0.0)
        m = m + (1.0 - mu) * (g - m)
        ahead = g + mu * (m - g)
        tl.store(momentum_ptr + place, m, mask=inside)
        tl.store(update_ptr + place, ahead.to(update_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _move(
    master_ptr: tl.tensor,
    working_ptr: tl.tensor,
    update_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    step_ptr: tl.tensor,
    is_bad_ptr: tl.tensor,
    size: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if tl.load(is_bad_ptr) == 0:
        kept, step = tl.load(kept_ptr), tl.load(step_ptr)
        w = tl.load(master_ptr + place, mask=inside, other=0.0)
        u = tl.load(update_ptr + place, mask=inside, other=0.0).to(tl.float32)
        w = w * kept - step * u
        tl.store(master_ptr + place, w, mask=inside)
        tl.store(working_ptr + place, w.to(working_ptr.dtype.element_ty), mask=inside)
