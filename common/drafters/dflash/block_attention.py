"""Attention of draft blocks over their document's context and themselves, as one op with a gradient.

    out = softmax(q [context_key | block_key]^T / sqrt(d)) [context_value | block_value]

under the mask of `attention.is_visible`, which neither builds tables nor joins the two kinds of keys.
On a GPU only; `attention.sdpa` under `attention.dense_mask` is the same function elsewhere.

n heads, g key heads, A blocks of S slots, Q = A * S, T context tokens, d head width. Queries may be of
the last SQ slots of each block alone: a last layer needs no more. R = A * SQ query rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.drafters.dflash.attention import BlockLayout, LayerWindow


class Tiles(NamedTuple):
    """How one kernel cuts its work."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


FORWARD = Tiles(64, 64, 4, 3)
BACKWARD_QUERY = Tiles(64, 32, 4, 2)
BACKWARD_KEYS = Tiles(64, 64, 4, 2)
_MIN_DOT = 16
_SMALLEST_WIDTH = 16


def attend_blocks(
    layout: BlockLayout,
    layer: LayerWindow,
    query: Tensor,  # [n, R, d]
    context: tuple[Tensor, Tensor],  # keys and values [g, T, d]
    block: tuple[Tensor, Tensor],  # keys and values [g, Q, d]
) -> Tensor:
    """Return [n, R, d]; `layout` and `layer` may change between replays of a graph."""
    out, _ = block_attention(
        query, *context, *block, layout.context_start, layout.context_stop, layer.window,
        layer.is_causal, layout.block_size,
    )  # fmt: skip
    return out


@torch.library.custom_op("ringdraft::block_attention", mutates_args=())
def block_attention(
    query: Tensor,  # [n, R, d]
    context_key: Tensor,  # [g, T, d]
    context_value: Tensor,  # [g, T, d]
    block_key: Tensor,  # [g, Q, d]
    block_value: Tensor,  # [g, Q, d]
    context_start: Tensor,  # [A] int32
    context_stop: Tensor,  # [A] int32, ascending where a block sees context
    window: Tensor,  # 0-dim int32
    is_causal: Tensor,  # 0-dim bool
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [n, R, d] and the base-2 log-sum-exp of the scores [n, R] float32."""
    from common.drafters.dflash import block_attention_kernels as kernels

    keys_values = [_rows_of(x) for x in (context_key, context_value, block_key, block_value)]
    query = _rows_of(query)
    num_heads, num_rows, width = query.shape
    out = _like_rows(query)
    lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=query.device)
    tiles = _fitted(FORWARD, query)
    kernels.forward[(num_heads, -(-num_rows // tiles.rows))](
        query, *keys_values, context_start, context_stop, window, is_causal, out, lse,
        width**-0.5, context_key.shape[1], num_rows, block_key.shape[1],
        *_strides(query, *keys_values, out),
        BM=tiles.rows, BN=tiles.keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **_constants(query, context_key, block_size, len(context_stop)),
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("ringdraft::block_attention_backward", mutates_args=())
def block_attention_backward(
    d_out: Tensor,
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    out: Tensor,
    lse: Tensor,
    context_start: Tensor,
    context_stop: Tensor,
    window: Tensor,
    is_causal: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, context keys, context values, block keys, block values."""
    from common.drafters.dflash import block_attention_kernels as kernels

    keys_values = [_rows_of(x) for x in (context_key, context_value, block_key, block_value)]
    query, d_out, out = _rows_of(query), _rows_of(d_out), _rows_of(out)
    num_heads, num_rows, width = query.shape
    scale, constants = width**-0.5, _constants(query, context_key, block_size, len(context_stop))
    delta, d_query = torch.empty_like(lse), _like_rows(query)
    tiles = _fitted(BACKWARD_QUERY, query)
    kernels.backward_query[(num_heads, -(-num_rows // tiles.rows))](
        query, *keys_values, context_start, context_stop, window, is_causal, out, lse, d_out,
        delta, d_query, scale, context_key.shape[1], num_rows, block_key.shape[1],
        *_strides(query, *keys_values, out, d_out, d_query),
        BM=tiles.rows, BN=tiles.keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **constants,
    )  # fmt: skip
    gradients = [_like_rows(x) for x in keys_values]
    tiles = _fitted(BACKWARD_KEYS, query)
    for is_context in (True, False):
        key, value = keys_values[:2] if is_context else keys_values[2:]
        d_key, d_value = gradients[:2] if is_context else gradients[2:]
        num_keys = key.shape[1]
        kernels.backward_keys[(len(key), -(-num_keys // tiles.keys))](
            query, key, value, context_start, context_stop, window, is_causal, lse, d_out, delta,
            d_key, d_value, scale, num_keys, num_rows, len(context_stop),
            *_strides(query, key, value, d_out, d_key, d_value),
            BM=tiles.rows, BN=tiles.keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            NUM_BLOCKS=_power_of_two(len(context_stop)), IS_CONTEXT=is_context, **constants,
        )  # fmt: skip
    return d_query, gradients[0], gradients[1], gradients[2], gradients[3]


@block_attention.register_fake
def _(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _like_rows(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@block_attention_backward.register_fake
def _(_d_out: Tensor, query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor,
      *_others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _like_rows(query), _like_rows(ck), _like_rows(cv), _like_rows(bk), _like_rows(bv)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_size = inputs
    ctx.save_for_backward(*tensors[:5], *output, *tensors[5:])


def _slope(ctx: Any, d_out: Tensor, _d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = block_attention_backward(d_out, *ctx.saved_tensors, ctx.block_size)
    return (*gradients, None, None, None, None, None)


block_attention.register_autograd(_slope, setup_context=_keep)


def _rows_of(x: Tensor) -> Tensor:
    """Return a tensor [n, rows, d] whose rows are read in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _like_rows(x: Tensor) -> Tensor:
    """Return an empty [n, rows, d] that lies as [rows, n, d], as projections make and take it."""
    return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the stride of a row and of a head, tensor by tensor."""
    return [stride for x in tensors for stride in (x.stride(1), x.stride(0))]


def _constants(query: Tensor, key: Tensor, block_size: int, num_blocks: int) -> dict[str, Any]:
    width = query.shape[-1]
    return {
        "S": block_size,
        "SQ": query.shape[1] // num_blocks,
        "D": width,
        "WIDTH": max(_SMALLEST_WIDTH, _power_of_two(width)),
        "GROUP": len(query) // len(key),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _fitted(tiles: Tiles, query: Tensor) -> Tiles:
    """Halve tiles that shared memory could not hold: float32 and wide heads."""
    bytes_a_row = query.element_size() * max(_SMALLEST_WIDTH, _power_of_two(query.shape[-1]))
    halvings = max(0, (bytes_a_row // 256).bit_length() - 1)
    rows, keys = (max(_MIN_DOT, size >> halvings) for size in (tiles.rows, tiles.keys))
    return tiles._replace(rows=rows, keys=keys)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
