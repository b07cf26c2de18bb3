"""The Triton kernel behind `loss.weighted_cross_entropy`; import it there alone.

A program a row, over its logits twice: once for the largest and the normaliser, once to put the
slope where the logits were. Every sum is in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_NUM_WARPS = 4


def cross_entropy_in_place(
    logits: Tensor,  # [R, V]; on return w * d(CE)/d(logits)
    labels: Tensor,  # [R] int64
    weights: Tensor,  # [R] float32
    losses: Tensor,  # [R] float32; on return w * CE
    is_correct: Tensor,  # [R] bool; on return argmax == label, False where w is 0
) -> None:
    """Launch on the current stream of the tensors' device."""
    rows, vocab = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    with torch.cuda.device(logits.device):
        _cross_entropy[(rows,)](
            logits, labels, weights, losses, is_correct, vocab, logits.stride(0),
            BLOCK=block, num_warps=_NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _cross_entropy(
    logits_ptr,
    labels_ptr,
    weights_ptr,
    losses_ptr,
    is_correct_ptr,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * stride
    label, weight = tl.load(labels_ptr + row), tl.load(weights_ptr + row)
    if weight == 0.0:
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            tl.store(base + column, tl.zeros([BLOCK], base.dtype.element_ty), mask=column < vocab)
        tl.store(losses_ptr + row, 0.0)
        tl.store(is_correct_ptr + row, False)
    else:
        chosen = tl.load(base + label).to(tl.float32)
        best, total = -float("inf"), 0.0
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            new_best = tl.maximum(best, tl.max(x, 0))
            total = total * tl.exp(best - new_best) + tl.sum(tl.exp(x - new_best), 0)
            best = new_best
        log_normaliser = best + tl.log(total)
        first_best = vocab
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            first_best = tl.minimum(first_best, tl.min(tl.where(x == best, column, vocab), 0))
            slope = tl.exp(x - log_normaliser) - tl.where(column == label, 1.0, 0.0)
            slope = (slope * weight).to(base.dtype.element_ty)
            tl.store(base + column, slope, mask=column < vocab)
        tl.store(losses_ptr + row, weight * (log_normaliser - chosen))
        tl.store(is_correct_ptr + row, first_best == label)
