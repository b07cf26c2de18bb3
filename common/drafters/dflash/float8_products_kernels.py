"""The Triton kernels behind `float8_products.scaled`; import them there alone, where there is a GPU.

Two passes over a matrix: the largest of every row and column, then both float8 copies of each tile, one
of them transposed. 2 * 2 + 2 * 1 bytes a value in bfloat16.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.drafters.dflash.float8_products import LARGEST, LEAST_MAXIMUM, Scaled

_ROWS, _COLUMNS, _NUM_WARPS = 64, 128, 4
_CAST_ROWS, _CAST_COLUMNS, _CAST_WARPS = 128, 128, 8


def scale(parts: Sequence[Tensor], out: Scaled) -> None:
    """Fill what is not empty in `out` from a matrix's parts; launches on the current stream."""
    num_rows, (num_columns, width) = sum(map(len, parts)), (parts[0].shape[1], out.columns.shape[1])
    maxima = torch.zeros(num_rows + num_columns, dtype=torch.float32, device=parts[0].device)
    firsts = [0, *itertools.accumulate(map(len, parts))]
    with torch.cuda.device(parts[0].device):
        for part, first in zip(parts, firsts, strict=False):
            grid = (triton.cdiv(len(part), _ROWS), triton.cdiv(num_columns, _COLUMNS))
            _maxima[grid](
                part, maxima[first:], maxima[num_rows:], len(part), num_columns, part.stride(0),
                BM=_ROWS, BK=_COLUMNS, num_warps=_NUM_WARPS,
            )  # fmt: skip
        for part, first, end in zip(parts, firsts, [*firsts[1:-1], width], strict=False):
            grid = (triton.cdiv(end - first, _CAST_ROWS), triton.cdiv(num_columns, _CAST_COLUMNS))
            _cast[grid](
                part, maxima[first:], maxima[num_rows:], out.rows[first:], out.row_scales[first:],
                out.columns[:, first:], out.column_scales, len(part), num_columns, part.stride(0),
                end - first, width, LARGEST, LEAST_MAXIMUM,
                BY_ROWS=len(out.rows) > 0, BY_COLUMNS=len(out.columns) > 0,
                BM=_CAST_ROWS, BK=_CAST_COLUMNS, num_warps=_CAST_WARPS,
            )  # fmt: skip


@triton.jit
def _maxima(
    x_ptr, row_ptr, column_ptr, num_rows, num_columns, stride, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row.to(tl.int64)[:, None] * stride + column[None, :]
    size = tl.abs(tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(row_ptr + row, tl.max(size, 1), mask=row < num_rows, sem="relaxed")
    tl.atomic_max(column_ptr + column, tl.max(size, 0), mask=column < num_columns, sem="relaxed")


@triton.jit
def _cast(
    x_ptr, row_max_ptr, column_max_ptr, rows_ptr, row_scale_ptr, columns_ptr, column_scale_ptr,
    num_rows, num_columns, stride, padded_rows, width, largest, least,
    BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    is_row, is_column, wide_row = row < num_rows, column < num_columns, row.to(tl.int64)
    inside = is_row[:, None] & is_column[None, :]
    x = tl.load(x_ptr + wide_row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    if BY_ROWS:
        row_max = tl.maximum(tl.load(row_max_ptr + row, mask=is_row, other=0.0), least)
        values = (x * (largest / row_max)[:, None]).to(rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + wide_row[:, None] * num_columns + column[None, :], values, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(row_scale_ptr + row, row_max / largest, mask=is_row)
    if BY_COLUMNS:
        column_max = tl.maximum(tl.load(column_max_ptr + column, mask=is_column, other=0.0), least)
        values = (x * (largest / column_max)[None, :]).to(columns_ptr.dtype.element_ty)
        tl.store(
            columns_ptr + column.to(tl.int64)[:, None] * width + row[None, :],
            tl.trans(values),
            mask=is_column[:, None] & (row < padded_rows)[None, :],
        )
        if tl.program_id(0) == 0:
            tl.store(column_scale_ptr + column, column_max / largest, mask=is_column)
