"""Labels, weights, and the chunked cross-entropy through the frozen head.

The op forms the gradient of its hidden rows in its forward: the head is frozen, so two products a
chunk are all there is, nothing is recomputed, and no logits outlive their chunk.

A anchors, S slots, R = A * (S - 1) supervised rows, H hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Supervision(NamedTuple):
    """What each draft slot should say, and what it weighs."""

    labels: Tensor  # [A, S-1] int64: the token at anchor + k
    weights: Tensor  # [A, S-1] float32: decay where supervised, else 0
    is_supervised: Tensor  # [A, S-1] bool


def supervise(
    token_ids: Tensor,  # [T] int32
    document_ids: Tensor,  # [T] int32
    loss_mask: Tensor,  # [T] uint8
    anchors: Tensor,  # [A] int64
    is_valid: Tensor,  # [A] bool
    decay: Tensor,  # [S-1] float32
) -> Supervision:
    """Label slot k with the token at anchor + k; supervision stops at the first gap.

    A slot after an unsupervised token or past the document is never reached in decoding, so its
    weight is 0. Other trainers supervise across such gaps.
    """
    offsets = torch.arange(1, len(decay) + 1, device=anchors.device)
    where = anchors[:, None] + offsets
    inside = where < len(token_ids)
    where = where.clamp_max(len(token_ids) - 1)
    reachable = inside & (document_ids[where] == document_ids[anchors][:, None])
    reachable = reachable & (loss_mask[where] != 0) & is_valid[:, None]
    is_supervised = reachable.to(torch.int32).cumprod(-1).to(torch.bool)
    return Supervision(token_ids[where].to(torch.int64), is_supervised * decay, is_supervised)


@torch.library.custom_op("ringdraft::weighted_cross_entropy", mutates_args=())
def weighted_cross_entropy(
    hidden: Tensor,  # [R, H]
    head: Tensor,  # [V, H]
    labels: Tensor,  # [R] int64
    weights: Tensor,  # [R] float32
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum of w * CE (0-dim), whether argmax is the label [R] bool, d(sum)/d(hidden) [R, H].

    A row of weight 0 is not looked at: its argmax is not the label.
    """
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    is_correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    gradient = torch.empty_like(hidden)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, min(start + chunk_rows, len(hidden)))
        logits = hidden[rows] @ head.T
        slope = _cross_entropy(logits, labels[rows], weights[rows], losses[rows], is_correct[rows])
        torch.mm(slope, head, out=gradient[rows])
    return losses.sum(), is_correct, gradient


def _cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, losses: Tensor, is_correct: Tensor
) -> Tensor:
    """Fill losses and is_correct of some rows; return d(sum of losses)/d(logits)."""
    if logits.is_cuda:
        from common.drafters.dflash.loss_kernels import cross_entropy_in_place

        cross_entropy_in_place(logits, labels, weights, losses, is_correct)
        return logits
    wide, label, weight = logits.float(), labels[:, None], weights[:, None]
    is_correct.copy_((wide.argmax(-1) == labels) & (weights != 0))
    log_normaliser = wide.logsumexp(-1, keepdim=True)
    losses.copy_((weight * (log_normaliser - wide.gather(1, label)))[:, 0])
    slope = wide.sub_(log_normaliser).exp_().mul_(weight)
    return slope.scatter_add_(1, label, -weight).to(logits.dtype)


@weighted_cross_entropy.register_fake
def _(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    del head, weights, chunk_rows
    return (
        hidden.new_empty((), dtype=torch.float32),
        labels.new_empty(labels.shape, dtype=torch.bool),
        torch.empty_like(hidden),
    )


def _keep_gradient(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    del inputs
    ctx.save_for_backward(output[2])


def _scale_gradient(
    ctx: torch.autograd.function.FunctionCtx, on_total: Tensor, *_others: Tensor | None
) -> tuple[Tensor, None, None, None, None]:
    (gradient,) = ctx.saved_tensors
    return gradient * on_total.to(gradient.dtype), None, None, None, None


weighted_cross_entropy.register_autograd(_scale_gradient, setup_context=_keep_gradient)
