"""Matrix products in float8 (e4m3) with a scale for each row and each column, and their gradients.

    y = x w^T        x by its rows, w by its rows
    dx = dy w        dy by its rows, w by its columns
    dw = dy^T x      dy by its columns, x by its columns

Both factors of a product are scaled along what is summed over, so each result has the scale of its row
times that of its column. The gradient is of the exact product: rounding counts as none (straight through).

M rows, K inputs, N outputs. Hopper's kernels want K and N in multiples of 16; M is padded where summed over.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.drafters.dflash.config import FLOAT8_MULTIPLE

LARGEST = 448.0
"""Of float8 e4m3."""
LEAST_MAXIMUM = 1e-12
"""Taken as the largest of a row of zeros, so that no scale is 0."""


class Scaled(NamedTuple):
    """A matrix by its rows and by its columns; value = float8 * scale. What nobody asks for is empty."""

    rows: Tensor  # [M, K] float8
    row_scales: Tensor  # [M, 1] float32
    columns: Tensor  # [K, padded M] float8: transposed, zeros behind the last row
    column_scales: Tensor  # [K, 1] float32


def scaled(*parts: Tensor, by_rows: bool = True, by_columns: bool = True) -> Scaled:
    """Return a matrix [M, K] in float8, given as parts one below the other."""
    like, num_rows, num_columns = parts[0], sum(map(len, parts)), parts[0].shape[1]
    kept_rows, kept_columns = num_rows * by_rows, num_columns * by_columns
    out = Scaled(
        like.new_empty(kept_rows, num_columns, dtype=torch.float8_e4m3fn),
        like.new_empty(kept_rows, 1, dtype=torch.float32),
        like.new_empty(kept_columns, padded(num_rows), dtype=torch.float8_e4m3fn),
        like.new_empty(kept_columns, 1, dtype=torch.float32),
    )
    if like.is_cuda:
        from common.drafters.dflash import float8_products_kernels as kernels

        kernels.scale(parts, out)
        return out
    whole = torch.cat(parts)
    if by_rows:
        _scale_rows(whole, out.rows, out.row_scales)
    if by_columns:
        _scale_rows(whole.T, out.columns, out.column_scales)
    return out


def padded(rows: int) -> int:
    """Return the next multiple of what the kernels sum over."""
    return -(-rows // FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, *,
    is_sum_exact: bool = False,
) -> Tensor:  # fmt: skip
    """Return a b^T [M, N] of float8 a [M, K], b [N, K] with scales [M, 1], [N, 1].

    Args:
        is_sum_exact: whether to sum in float32. Hopper's own sums have 14 bits: what is added to a
            sum that has grown large is cut towards zero, a bias where many terms have one sign.
    """
    if a.is_cuda:
        return torch._scaled_mm(  # noqa: SLF001 - torch's only door to float8 products
            a,
            b.t(),
            scale_a=a_scales,
            scale_b=b_scales.t(),
            out_dtype=dtype,
            use_fast_accum=not is_sum_exact,
        )
    return ((a.float() * a_scales) @ (b.float() * b_scales).T).to(dtype)


def float8_products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return x w^T [M, N_i] for weights [N_i, K]: one product over all of them."""
    joined, *_ = joined_products(x, list(weights), x.requires_grad)
    return list(joined.split([len(weight) for weight in weights], -1))


@torch.library.custom_op("ringdraft::float8_products", mutates_args=())
def joined_products(
    x: Tensor,  # [M, K]
    weights: list[Tensor],  # [N_i, K]
    needs_d_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x w^T [M, sum N_i], and what the gradient needs: x and w by their columns, with scales."""
    weight = scaled(*weights, by_columns=needs_d_x)
    rows = scaled(x)
    y = product(rows.rows, rows.row_scales, weight.rows, weight.row_scales, x.dtype)
    return y, rows.columns, rows.column_scales, weight.columns, weight.column_scales


@joined_products.register_fake
def _(
    x: Tensor, weights: list[Tensor], needs_d_x: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs, inputs = sum(len(weight) for weight in weights), x.shape[1]
    return (
        x.new_empty(len(x), outputs),
        x.new_empty(inputs, padded(len(x)), dtype=torch.float8_e4m3fn),
        x.new_empty(inputs, 1, dtype=torch.float32),
        x.new_empty(inputs * needs_d_x, padded(outputs), dtype=torch.float8_e4m3fn),
        x.new_empty(inputs * needs_d_x, 1, dtype=torch.float32),
    )


@torch.library.custom_op("ringdraft::float8_products_backward", mutates_args=())
def joined_products_backward(
    d_y: Tensor,  # [M, N]
    x_columns: Tensor,
    x_scales: Tensor,
    weight_columns: Tensor,
    weight_scales: Tensor,
    needs_d_x: bool,
) -> tuple[Tensor, Tensor]:
    """Return d_x [M, K], without rows where nobody needs it, and d_w [N, K]."""
    slope = scaled(d_y, by_rows=needs_d_x)
    if needs_d_x:
        d_x = product(slope.rows, slope.row_scales, weight_columns, weight_scales, d_y.dtype)
    else:
        d_x = d_y.new_empty(0, len(x_columns))
    d_w = product(slope.columns, slope.column_scales, x_columns, x_scales, d_y.dtype)
    return d_x, d_w


@joined_products_backward.register_fake
def _(
    d_y: Tensor, x_columns: Tensor, _x: Tensor, _w: Tensor, _s: Tensor, needs_d_x: bool
) -> tuple[Tensor, Tensor]:
    inputs = len(x_columns)
    return d_y.new_empty(len(d_y) * needs_d_x, inputs), d_y.new_empty(d_y.shape[1], inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.sizes = [len(weight) for weight in inputs[1]]
    ctx.needs_d_x = inputs[2]
    ctx.save_for_backward(*output[1:])


def _slope(ctx: Any, d_y: Tensor, *_others: Any) -> tuple[Tensor | None, list[Tensor], None]:
    d_x, d_w = joined_products_backward(d_y.contiguous(), *ctx.saved_tensors, ctx.needs_d_x)
    return d_x if ctx.needs_d_x else None, list(d_w.split(ctx.sizes)), None


joined_products.register_autograd(_slope, setup_context=_keep)


def _scale_rows(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Fill values [R, at least C] and scales [R, 1] of x [R, C], zeros behind its last column."""
    wide = x.float()
    scales.copy_(wide.abs().amax(1, keepdim=True).clamp_min(LEAST_MAXIMUM) / LARGEST)
    values.copy_(torch.nn.functional.pad(wide / scales, (0, values.shape[1] - x.shape[1])))
