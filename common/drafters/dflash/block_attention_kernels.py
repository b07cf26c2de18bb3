"""Triton kernels of `block_attention`; import it there alone, where there is a GPU.

    forward         a program a (tile of query rows, head): online softmax over the tile's context
                     range, then over its own blocks; writes out and the log-sum-exp
    backward_query  the same walk; writes delta = rowsum(out * d_out) and d_query
    backward_keys   a program a (tile of keys, key head): every query row that sees the tile, for each
                     query head of the group; writes d_key and d_value

Blocks are sorted by anchor and documents lie in order, so the rows that see a key tile, and the
keys that a row tile sees, are one interval each: there are no index tables.

A tile of rows by keys whose every pair is visible needs no mask; those are the most, and each interval
is walked in two loops: its edges under the mask, its inside without.

Scores are kept in base 2 (exp2 is one instruction). S^T = K Q^T in the key kernel, so that P^T is
where the next product needs it.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(start_ptr, stop_ptr, window, row, num_rows, S: tl.constexpr, SQ: tl.constexpr):
    """Return the visible context interval [low, stop) of query rows; empty past the last row."""
    block = row // SQ
    inside = row < num_rows
    stop = tl.load(stop_ptr + block, mask=inside, other=0)
    start = tl.load(start_ptr + block, mask=inside, other=0)
    low = tl.maximum(start, stop + row % SQ + (S - SQ) - (window - 1))
    return low, stop


@triton.jit
def _blocks_that_see(
    start_ptr, stop_ptr, window, begin, end, num_blocks,
    S: tl.constexpr, SQ: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return two runs of sorted blocks: [first, last) around those of which a slot sees any of the keys
    [begin, end), and in it [inner, outer) of those whose every slot sees all of them."""
    block = tl.arange(0, NUM_BLOCKS)
    stop = tl.load(stop_ptr + block, mask=block < num_blocks, other=0)
    start = tl.load(start_ptr + block, mask=block < num_blocks, other=0)
    sees = start < stop
    low = tl.maximum(start, stop + (S - SQ) - (window - 1))
    highest_low = tl.maximum(start, stop + S - 1 - (window - 1))
    first = tl.min(tl.where(sees & (stop > begin), block, NUM_BLOCKS), 0)
    last = tl.max(tl.where(sees & (low < end), block + 1, 0), 0)
    inner = tl.min(tl.where(sees & (stop >= end), block, NUM_BLOCKS), 0)
    outer = tl.max(tl.where(sees & (highest_low <= begin), block + 1, 0), 0)
    return first, last, inner, outer


@triton.jit
def _split(first, last, inner, outer, STEP: tl.constexpr):
    """Return where whole steps from `first` lie inside [inner, outer): (from, to), and how many steps
    are before and behind them; with none inside, all are before."""
    begin = first + tl.cdiv(tl.maximum(inner - first, 0), STEP) * STEP
    end = first + tl.maximum(outer - first, 0) // STEP * STEP
    whole = first + tl.cdiv(tl.maximum(last - first, 0), STEP) * STEP
    begin = tl.where(begin < end, begin, whole)
    end = tl.where(begin < end, end, whole)
    return begin, end, (begin - first) // STEP, tl.cdiv(tl.maximum(last - end, 0), STEP)


@triton.jit
def _edge(index, first, num_before, end, STEP: tl.constexpr):
    """Return where the index-th step outside of the inside begins."""
    return tl.where(index < num_before, first + index * STEP, end + (index - num_before) * STEP)


@triton.jit
def _own_mask(row, key, window, is_causal, num_keys, S: tl.constexpr, SQ: tl.constexpr):
    """Return which keys of the blocks a query row sees; both broadcast."""
    behind = row % SQ + (S - SQ) - key % S
    seen = (row // SQ == key // S) & (key < num_keys) & (behind < window)
    return seen & ((behind >= 0) | (is_causal == 0))


@triton.jit
def _load(base, row, stride, num_rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows [len(row), WIDTH] of a head, zero beyond its rows and its width D."""
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None]
    if D != WIDTH:
        inside = inside & (column < D)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _load_inside(base, row, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows that all exist, zero beyond their width D."""
    column = tl.arange(0, WIDTH)
    place = base + row[:, None] * stride + column[None, :]
    if D != WIDTH:
        return tl.load(place, mask=(column < D)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def _store(base, row, stride, num_rows, value, D: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None]
    if D != WIDTH:
        inside = inside & (column < D)[None, :]
    tl.store(
        base + row[:, None] * stride + column[None, :], value.to(base.dtype.element_ty), mask=inside
    )


@triton.jit
def _attend(q, k, v, visible, scale, best, total, out, PRECISION: tl.constexpr):
    """Advance the online softmax by one tile of keys; `visible` may be None: all are."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * scale)
    # Rows that have seen nothing so far keep -inf; subtracting 0 there keeps NaN away.
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(best - shift)
    total = total * keep + tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, out * keep[:, None], input_precision=PRECISION)
    return new_best, total, out


@triton.jit
def forward(
    query, context_key, context_value, block_key, block_value, start_ptr, stop_ptr, window_ptr,
    causal_ptr, out_ptr, lse_ptr, scale, num_context, num_rows, num_keys,
    q_row, q_head, ck_row, ck_head, cv_row, cv_head, bk_row, bk_head, bv_row, bv_head, o_row, o_head,
    S: tl.constexpr, SQ: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # Later tiles of a document see more: the long ones start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv = head // GROUP
    window, is_causal = tl.load(window_ptr), tl.load(causal_ptr).to(tl.int32)
    row = tile * BM + tl.arange(0, BM)
    low, stop = _rows(start_ptr, stop_ptr, window, row, num_rows, S, SQ)
    sees = low < stop
    q = _load(query + head * q_head, row, q_row, num_rows, D, WIDTH)
    base2 = scale * LOG2E
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, WIDTH], tl.float32)
    first = tl.min(tl.where(sees, low, num_context), 0) // BN * BN
    last = tl.max(tl.where(sees, stop, 0), 0)
    begin, end, before, behind = _split(first, last, tl.max(low, 0), tl.min(stop, 0), BN)
    for index in range(before + behind):
        key = _edge(index, first, before, end, BN) + tl.arange(0, BN)
        k = _load(context_key + kv * ck_head, key, ck_row, num_context, D, WIDTH)
        v = _load(context_value + kv * cv_head, key, cv_row, num_context, D, WIDTH)
        visible = (key[None, :] >= low[:, None]) & (key[None, :] < stop[:, None])
        best, total, out = _attend(q, k, v, visible, base2, best, total, out, PRECISION)
    for at in range(begin, end, BN):
        key = at + tl.arange(0, BN)
        k = _load_inside(context_key + kv * ck_head, key, ck_row, D, WIDTH)
        v = _load_inside(context_value + kv * cv_head, key, cv_row, D, WIDTH)
        best, total, out = _attend(q, k, v, None, base2, best, total, out, PRECISION)
    own = tile * BM // SQ * S
    own_end = tl.minimum(((tile * BM + BM - 1) // SQ + 1) * S, num_keys)
    for at in range(own, own_end, BN):
        key = at + tl.arange(0, BN)
        k = _load(block_key + kv * bk_head, key, bk_row, num_keys, D, WIDTH)
        v = _load(block_value + kv * bv_head, key, bv_row, num_keys, D, WIDTH)
        visible = _own_mask(row[:, None], key[None, :], window, is_causal, num_keys, S, SQ)
        best, total, out = _attend(q, k, v, visible, base2, best, total, out, PRECISION)
    _store(out_ptr + head * o_head, row, o_row, num_rows, out / total[:, None], D, WIDTH)
    tl.store(lse_ptr + head * num_rows + row, best + tl.log2(total), mask=row < num_rows)


@triton.jit
def _slope_of_query(q, k, v, d_out, visible, scale, lse, delta, d_q, PRECISION: tl.constexpr):
    """Add one tile of keys to d_query / scale."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(scores * scale - lse[:, None])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    d_p = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    d_s = p * (d_p - delta[:, None])
    return tl.dot(d_s.to(k.dtype), k, d_q, input_precision=PRECISION)


@triton.jit
def backward_query(
    query, context_key, context_value, block_key, block_value, start_ptr, stop_ptr, window_ptr,
    causal_ptr, out_ptr, lse_ptr, d_out_ptr, delta_ptr, d_query, scale, num_context, num_rows, num_keys,
    q_row, q_head, ck_row, ck_head, cv_row, cv_head, bk_row, bk_head, bv_row, bv_head, o_row, o_head,
    do_row, do_head, dq_row, dq_head,
    S: tl.constexpr, SQ: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv = head // GROUP
    window, is_causal = tl.load(window_ptr), tl.load(causal_ptr).to(tl.int32)
    row = tile * BM + tl.arange(0, BM)
    low, stop = _rows(start_ptr, stop_ptr, window, row, num_rows, S, SQ)
    sees = low < stop
    q = _load(query + head * q_head, row, q_row, num_rows, D, WIDTH)
    base2 = scale * LOG2E
    d_out = _load(d_out_ptr + head * do_head, row, do_row, num_rows, D, WIDTH)
    out = _load(out_ptr + head * o_head, row, o_row, num_rows, D, WIDTH)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(delta_ptr + head * num_rows + row, delta, mask=row < num_rows)
    lse = tl.load(lse_ptr + head * num_rows + row, mask=row < num_rows, other=0.0)
    d_q = tl.zeros([BM, WIDTH], tl.float32)
    first = tl.min(tl.where(sees, low, num_context), 0) // BN * BN
    last = tl.max(tl.where(sees, stop, 0), 0)
    begin, end, before, behind = _split(first, last, tl.max(low, 0), tl.min(stop, 0), BN)
    for index in range(before + behind):
        key = _edge(index, first, before, end, BN) + tl.arange(0, BN)
        k = _load(context_key + kv * ck_head, key, ck_row, num_context, D, WIDTH)
        v = _load(context_value + kv * cv_head, key, cv_row, num_context, D, WIDTH)
        visible = (key[None, :] >= low[:, None]) & (key[None, :] < stop[:, None])
        d_q = _slope_of_query(q, k, v, d_out, visible, base2, lse, delta, d_q, PRECISION)
    for at in range(begin, end, BN):
        key = at + tl.arange(0, BN)
        k = _load_inside(context_key + kv * ck_head, key, ck_row, D, WIDTH)
        v = _load_inside(context_value + kv * cv_head, key, cv_row, D, WIDTH)
        d_q = _slope_of_query(q, k, v, d_out, None, base2, lse, delta, d_q, PRECISION)
    own = tile * BM // SQ * S
    own_end = tl.minimum(((tile * BM + BM - 1) // SQ + 1) * S, num_keys)
    for at in range(own, own_end, BN):
        key = at + tl.arange(0, BN)
        k = _load(block_key + kv * bk_head, key, bk_row, num_keys, D, WIDTH)
        v = _load(block_value + kv * bv_head, key, bv_row, num_keys, D, WIDTH)
        visible = _own_mask(row[:, None], key[None, :], window, is_causal, num_keys, S, SQ)
        d_q = _slope_of_query(q, k, v, d_out, visible, base2, lse, delta, d_q, PRECISION)
    _store(d_query + head * dq_head, row, dq_row, num_rows, d_q * scale, D, WIDTH)


@triton.jit
def _slope_of_keys(
    q, k, v, d_out, visible, scale, lse, delta, d_k, d_v, PRECISION: tl.constexpr
):  # fmt: skip
    """Add one tile of query rows to d_key / scale and d_value."""
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.exp2(scores * scale - lse[None, :])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    d_v = tl.dot(p.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
    d_p = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    d_s = p * (d_p - delta[None, :])
    return tl.dot(d_s.to(q.dtype), q, d_k, input_precision=PRECISION), d_v


@triton.jit
def backward_keys(
    query, key_ptr, value_ptr, start_ptr, stop_ptr, window_ptr, causal_ptr, lse_ptr, d_out_ptr,
    delta_ptr, d_key, d_value, scale, num_keys, num_rows, num_blocks,
    q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head, dk_row, dk_head, dv_row, dv_head,
    S: tl.constexpr, SQ: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, NUM_BLOCKS: tl.constexpr, IS_CONTEXT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0)
    tile = tl.program_id(1)
    window, is_causal = tl.load(window_ptr), tl.load(causal_ptr).to(tl.int32)
    key = tile * BN + tl.arange(0, BN)
    k = _load(key_ptr + kv * k_head, key, k_row, num_keys, D, WIDTH)
    base2 = scale * LOG2E
    v = _load(value_ptr + kv * v_head, key, v_row, num_keys, D, WIDTH)
    if IS_CONTEXT:
        first, last, inner, outer = _blocks_that_see(
            start_ptr, stop_ptr, window, tile * BN, tile * BN + BN, num_blocks, S, SQ, NUM_BLOCKS
        )
    else:
        first, last = tile * BN // S, (tl.minimum(tile * BN + BN, num_keys) - 1) // S + 1
        inner, outer = first, first
    first = first * SQ
    begin, end, before, behind = _split(first, last * SQ, inner * SQ, outer * SQ, BM)
    edges, steps = before + behind, (end - begin) // BM
    d_k, d_v = tl.zeros([BN, WIDTH], tl.float32), tl.zeros([BN, WIDTH], tl.float32)
    for step in range(GROUP * edges):
        head = kv * GROUP + step // edges
        row = _edge(step % edges, first, before, end, BM) + tl.arange(0, BM)
        inside = row < num_rows
        q = _load(query + head * q_head, row, q_row, num_rows, D, WIDTH)
        d_out = _load(d_out_ptr + head * do_head, row, do_row, num_rows, D, WIDTH)
        lse = tl.load(lse_ptr + head * num_rows + row, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + head * num_rows + row, mask=inside, other=0.0)
        if IS_CONTEXT:
            low, stop = _rows(start_ptr, stop_ptr, window, row, num_rows, S, SQ)
            visible = (key[:, None] >= low[None, :]) & (key[:, None] < stop[None, :])
        else:
            visible = _own_mask(row[None, :], key[:, None], window, is_causal, num_keys, S, SQ)
            visible = visible & inside[None, :]
        d_k, d_v = _slope_of_keys(
            q, k, v, d_out, visible, base2, lse, delta, d_k, d_v, PRECISION
        )  # fmt: skip
    if IS_CONTEXT:
        for step in range(GROUP * steps):
            head = kv * GROUP + step // steps
            row = begin + step % steps * BM + tl.arange(0, BM)
            q = _load_inside(query + head * q_head, row, q_row, D, WIDTH)
            d_out = _load_inside(d_out_ptr + head * do_head, row, do_row, D, WIDTH)
            lse = tl.load(lse_ptr + head * num_rows + row)
            delta = tl.load(delta_ptr + head * num_rows + row)
            d_k, d_v = _slope_of_keys(
                q, k, v, d_out, None, base2, lse, delta, d_k, d_v, PRECISION
            )  # fmt: skip
    _store(d_key + kv * dk_head, key, dk_row, num_keys, d_k * scale, D, WIDTH)
    _store(d_value + kv * dv_head, key, dv_row, num_keys, d_v, D, WIDTH)
