"""The Triton kernels behind `loss.head_loss`; import them there alone. Formulas: `row_losses`.

A program a row: over its logits for the largest and the normaliser, once more for sums that need
these, and a last time to put the slopes where the logits were. Every sum is in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.drafters.dflash.float8_products import LARGEST, LEAST_MAXIMUM
from common.drafters.dflash.row_losses import LK_ETA, RowLoss

_BLOCK = 2048
_NUM_WARPS = 4
_KINDS = {"kl": 0, "total_variation": 1, "lk": 2}


def cross_entropy_in_place(
    logits: Tensor,  # [R, V]; on return d(CE)/d(logits)
    labels: Tensor,  # [R] int64
    is_used: Tensor,  # [R] bool; other rows get zeros
    losses: Tensor,  # [R] float32; on return CE
    is_correct: Tensor,  # [R] bool; on return argmax == label
) -> None:
    """Launch on the current stream of the tensors' device."""
    rows, vocab = logits.shape
    with torch.cuda.device(logits.device):
        _cross_entropy[(rows,)](
            logits, labels, is_used, losses, is_correct, vocab, logits.stride(0),
            BLOCK=_block(vocab), num_warps=_NUM_WARPS,
        )  # fmt: skip


def cross_entropy_in_float8(
    logits: Tensor,  # [R, V]
    labels: Tensor,  # [R] int64
    is_used: Tensor,  # [R] bool; other rows get zeros
    losses: Tensor,  # [R] float32; on return CE
    is_correct: Tensor,  # [R] bool; on return argmax == label
    others: Tensor,  # [R, V] float8; on return scaled d(CE)/d(logits), 0 at the label
    scales: Tensor,  # [R, 1] float32; on return theirs
    of_label: Tensor,  # [R] float32; on return the label's d(CE)/d(logit)
) -> None:
    """Launch on the current stream of the tensors' device."""
    rows, vocab = logits.shape
    with torch.cuda.device(logits.device):
        _cross_entropy_in_float8[(rows,)](
            logits, labels, is_used, losses, is_correct, others, scales, of_label, vocab,
            logits.stride(0), others.stride(0), LARGEST, LEAST_MAXIMUM,
            BLOCK=_block(vocab), num_warps=_NUM_WARPS,
        )  # fmt: skip


def against_target_in_place(
    logits: Tensor,  # [R, V]; on return d(loss)/d(logits)
    target_logits: Tensor,  # [R, V]
    labels: Tensor,  # [R] int64
    is_used: Tensor,  # [R] bool; other rows get zeros
    losses: Tensor,  # [R] float32; on return the loss
    is_correct: Tensor,  # [R] bool; on return argmax == label
    kind: RowLoss,  # all but cross-entropy
) -> None:
    """Launch on the current stream of the tensors' device."""
    rows, vocab = logits.shape
    with torch.cuda.device(logits.device):
        _against_target[(rows,)](
            logits, target_logits, labels, is_used, losses, is_correct, vocab,
            logits.stride(0), target_logits.stride(0), LK_ETA,
            KIND=_KINDS[kind], BLOCK=_block(vocab), num_warps=_NUM_WARPS,
        )  # fmt: skip


def _block(vocab: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab))


@triton.jit
def _cross_entropy(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    is_used_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    is_correct_ptr: tl.tensor,
    vocab: tl.int32,
    stride: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * stride
    if tl.load(is_used_ptr + row):
        label = tl.load(labels_ptr + row)
        chosen = tl.load(base + label).to(tl.float32)
        best, log_normaliser = _normaliser(base, vocab, BLOCK)
        first_best = vocab
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            first_best = tl.minimum(first_best, tl.min(tl.where(x == best, column, vocab), 0))
            slope = tl.exp(x - log_normaliser) - tl.where(column == label, 1.0, 0.0)
            tl.store(base + column, slope.to(base.dtype.element_ty), mask=column < vocab)
        tl.store(losses_ptr + row, log_normaliser - chosen)
        tl.store(is_correct_ptr + row, first_best == label)
    else:
        _clear(base, losses_ptr + row, is_correct_ptr + row, vocab, BLOCK)


@triton.jit
def _cross_entropy_in_float8(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    is_used_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    is_correct_ptr: tl.tensor,
    others_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    of_label_ptr: tl.tensor,
    vocab: tl.int32,
    stride: tl.int32,
    others_stride: tl.int32,
    largest: tl.float32,
    least: tl.float32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * stride
    others = others_ptr + row.to(tl.int64) * others_stride
    if tl.load(is_used_ptr + row):
        label = tl.load(labels_ptr + row)
        chosen = tl.load(base + label).to(tl.float32)
        best, total = -float("inf"), 0.0
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            is_other = (column < vocab) & (column != label)
            x = tl.load(base + column, mask=is_other, other=-float("inf")).to(tl.float32)
            new_best = tl.maximum(best, tl.max(x, 0))
            # Where nothing but the label has come yet, both are -inf.
            total = tl.where(best == new_best, total, total * tl.exp(best - new_best))
            total += tl.sum(tl.where(is_other, tl.exp(x - new_best), 0.0), 0)
            best = new_best
        highest = tl.maximum(best, chosen)
        normaliser = highest + tl.log(total * tl.exp(best - highest) + tl.exp(chosen - highest))
        scale = tl.maximum(tl.exp(best - normaliser), least) / largest
        first_best = vocab
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            first_best = tl.minimum(first_best, tl.min(tl.where(x == highest, column, vocab), 0))
            chance = tl.where(column == label, 0.0, tl.exp(x - normaliser) / scale)
            tl.store(others + column, chance.to(others.dtype.element_ty), mask=column < vocab)
        tl.store(scales_ptr + row, scale)
        tl.store(of_label_ptr + row, tl.exp(chosen - normaliser) - 1.0)
        tl.store(losses_ptr + row, normaliser - chosen)
        tl.store(is_correct_ptr + row, first_best == label)
    else:
        _clear(others, losses_ptr + row, is_correct_ptr + row, vocab, BLOCK)
        tl.store(scales_ptr + row, least / largest)
        tl.store(of_label_ptr + row, 0.0)


@triton.jit
def _against_target(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    is_used_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    is_correct_ptr: tl.tensor,
    vocab: tl.int32,
    stride: tl.int32,
    target_stride: tl.int32,
    eta: tl.float32,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * stride
    target = target_ptr + row.to(tl.int64) * target_stride
    if tl.load(is_used_ptr + row):
        best, draft_normaliser = _normaliser(base, vocab, BLOCK)
        _, target_normaliser = _normaliser(target, vocab, BLOCK)
        first_best, divergence, acceptance, tilt = vocab, 0.0, 0.0, 0.0
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            inside = column < vocab
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            y = tl.load(target + column, mask=inside, other=-float("inf")).to(tl.float32)
            first_best = tl.minimum(first_best, tl.min(tl.where(x == best, column, vocab), 0))
            log_q, log_p = x - draft_normaliser, y - target_normaliser
            q, p = tl.exp(log_q), tl.exp(log_p)
            divergence += tl.sum(tl.where(inside, p * (log_p - log_q), 0.0), 0)
            acceptance += tl.sum(tl.minimum(p, q), 0)
            tilt += tl.sum(q * _side(q, p), 0)
        share = tl.exp(-eta * acceptance) if KIND == 2 else 1.0 - KIND
        for at in range(0, vocab, BLOCK):
            column = at + tl.arange(0, BLOCK)
            inside = column < vocab
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            y = tl.load(target + column, mask=inside, other=-float("inf")).to(tl.float32)
            q, p = tl.exp(x - draft_normaliser), tl.exp(y - target_normaliser)
            slope = share * (q - p) + (1.0 - share) * q * (_side(q, p) - tilt)
            tl.store(base + column, slope.to(base.dtype.element_ty), mask=inside)
        tl.store(losses_ptr + row, share * divergence + (1.0 - share) * (1.0 - acceptance))
        tl.store(is_correct_ptr + row, first_best == tl.load(labels_ptr + row))
    else:
        _clear(base, losses_ptr + row, is_correct_ptr + row, vocab, BLOCK)


@triton.jit
def _normaliser(
    base: tl.tensor,
    vocab: tl.int32,
    BLOCK: tl.constexpr,
) -> tuple:
    """Return the largest of a row and the logarithm of its sum of exponentials."""
    best, total = -float("inf"), 0.0
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        new_best = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - new_best) + tl.sum(tl.exp(x - new_best), 0)
        best = new_best
    return best, best + tl.log(total)


@triton.jit
def _side(
    q: tl.tensor,
    p: tl.tensor,
) -> tl.tensor:
    """Return half the sign of q - p."""
    return tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))


@triton.jit
def _clear(
    base: tl.tensor,
    loss_ptr: tl.tensor,
    is_correct_ptr: tl.tensor,
    vocab: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        tl.store(base + column, tl.zeros([BLOCK], base.dtype.element_ty), mask=column < vocab)
    tl.store(loss_ptr, 0.0)
    tl.store(is_correct_ptr, False)
