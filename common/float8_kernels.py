"""The two Triton kernels behind `common.float8`; import it there alone, where there is a GPU.

    quantise     a program a token: reads W values once, keeps them in registers over the search for
                 the largest, writes W float8 and the scale         2 (or 4) + 1 bytes a value
    dequantise   a program a tile of a token                        1 + 2 (or 4) bytes a value

A row wider than a program's registers is read twice, the second time from a cache. Every product
is a single IEEE operation and the conversions round to nearest even, as torch does on the CPU.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_THREADS_A_WARP = 32


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work; both are powers of two."""

    max_block: int
    """Values that a program has in registers at once."""
    values_a_thread: int

    def block(self, width: int) -> int:
        """Return the values of a block for tokens of `width` values."""
        return min(triton.next_power_of_2(width), self.max_block)

    def num_warps(self, width: int) -> int:
        """Return the warps of a program for tokens of `width` values."""
        threads = self.block(width) // self.values_a_thread
        return min(32, max(1, threads // _THREADS_A_WARP))


QUANTISE = Tiling(max_block=32768, values_a_thread=64)
DEQUANTISE = Tiling(max_block=4096, values_a_thread=32)


def quantise(
    features: Tensor,
    values: Tensor,
    scales: Tensor,
    *,
    largest: float,
    least_scale: float,
    tiling: Tiling = QUANTISE,
) -> None:
    """Launch on the current stream of the tensors' device; arguments as in `float8.quantise`."""
    tokens, width = values.shape
    with torch.cuda.device(values.device):
        _quantise[(tokens,)](
            features, values, scales, len(features),
            WIDTH=width, BLOCK=tiling.block(width), LARGEST=largest, LEAST_SCALE=least_scale,
            num_warps=tiling.num_warps(width),
        )  # fmt: skip


def dequantise(values: Tensor, scales: Tensor, out: Tensor, *, tiling: Tiling = DEQUANTISE) -> None:
    """Launch on the current stream of the tensors' device; arguments as in `float8.dequantise`."""
    tokens, width = values.shape
    block = tiling.block(width)
    with torch.cuda.device(values.device):
        _dequantise[(tokens, triton.cdiv(width, block))](
            values, scales, out, WIDTH=width, BLOCK=block, num_warps=tiling.num_warps(width)
        )


@triton.jit(do_not_specialize=["used_tokens"])
def _quantise(
    features: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    used_tokens: tl.int32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = token.to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    is_used = token < used_tokens
    # Tokens behind the used ones read nothing: they are zeros.
    x = tl.load(features + row + columns, (columns < WIDTH) & is_used, 0.0).to(tl.float32)
    peak = tl.max(tl.abs(x))
    for start in tl.range(BLOCK, WIDTH, BLOCK):
        mask = (start + columns < WIDTH) & is_used
        more = tl.load(features + row + start + columns, mask, 0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(more)))
    scale = tl.maximum(peak * (1 / LARGEST), LEAST_SCALE)
    inverse = tl.div_rn(1.0, scale)
    tl.store(scales + token, scale)
    value = (x * inverse).to(tl.float8e4nv)
    tl.store(values + row + columns, value, columns < WIDTH)
    for start in tl.range(BLOCK, WIDTH, BLOCK):
        mask = start + columns < WIDTH
        more = tl.load(features + row + start + columns, mask & is_used, 0.0).to(tl.float32)
        value = (more * inverse).to(tl.float8e4nv)
        tl.store(values + row + start + columns, value, mask)


@triton.jit
def _dequantise(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = token.to(tl.int64) * WIDTH
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + row + columns, columns < WIDTH, 0.0).to(tl.float32)
    x = value * tl.load(scales + token)
    tl.store(out + row + columns, x.to(out.dtype.element_ty), columns < WIDTH)
