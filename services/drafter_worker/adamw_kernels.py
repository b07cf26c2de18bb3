"""The Triton kernel behind `adamw.AdamWRule`; import it there alone, where there is a GPU.

One pass: gradient (2 or 4 bytes), master and two moments (read and written, 24), working weight (2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_NUM_WARPS = 8


def adamw_in_place(
    master: Tensor, working: Tensor, gradient: Tensor, first: Tensor, second: Tensor,
    scalars: Tensor, beta1: float, beta2: float, epsilon: float, weight_decay: float,
) -> None:  # fmt: skip
    """Launch on the current stream; all tensors contiguous, `scalars` as `AdamWRule` packs them."""
    size = master.numel()
    with torch.cuda.device(master.device):
        _adamw[(triton.cdiv(size, _BLOCK),)](
            master, working, gradient, first, second, scalars, size,
            beta1, beta2, epsilon, weight_decay, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _adamw(
    master_ptr: tl.tensor,
    working_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    scalars_ptr: tl.tensor,
    size: tl.int32,
    beta1: tl.float32,
    beta2: tl.float32,
    epsilon: tl.float32,
    weight_decay: tl.float32,
    BLOCK: tl.constexpr,
) -> None:
    is_good = tl.load(scalars_ptr + 4)
    if is_good != 0.0:
        rate, scale = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
        correction1, root_correction2 = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        g = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
        m = tl.load(first_ptr + place, mask=inside, other=0.0)
        v = tl.load(second_ptr + place, mask=inside, other=0.0)
        w = tl.load(master_ptr + place, mask=inside, other=0.0)
        m = m + (1.0 - beta1) * (g - m)
        v = v * beta2 + (1.0 - beta2) * g * g
        w = w * (1.0 - rate * weight_decay)
        w = w - (rate / correction1) * m / (tl.sqrt(v) / root_correction2 + epsilon)
        tl.store(first_ptr + place, m, mask=inside)
        tl.store(second_ptr + place, v, mask=inside)
        tl.store(master_ptr + place, w, mask=inside)
        tl.store(working_ptr + place, w.to(working_ptr.dtype.element_ty), mask=inside)
