"""Labels, weights, and the losses of draft slots through the frozen head.

    loss = sum of weight * loss of a slot; the caller divides by the sum of weights, after reductions

The op forms the gradient of each hidden row in its forward: the head is frozen, so two products a
chunk (a third for the target's logits) are all there is, nothing is recomputed, and no logits outlive
their chunk. Rows come out unweighted, and the backward scales each by what its loss counts: weights may
depend on the losses, as D-PACE's do.

Of a target that caps its logits, only the target's own are capped: the drafter learns that distribution
with logits that nothing caps, in training as in serving.

A anchors, S slots, R = A * (S - 1) draft rows, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from common.drafters.dflash.float8_products import Scaled, product, scaled
from common.drafters.dflash.float8_slopes import float8_slopes, head_gradient
from common.drafters.dflash.row_losses import RowLoss, against_target, cross_entropy

_DPACE_ALPHA = 0.5


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


def fit_blocks(supervision: Supervision, head_rows: int) -> tuple[Supervision, Tensor]:
    """Take the supervision off whole blocks, from the end, until the rest has at most `head_rows` rows.

    Returns it with how many blocks [] have lost theirs.
    """
    supervised = supervision.is_supervised
    fits = supervised.sum(-1).cumsum(0) <= head_rows
    num_dropped = (supervised[:, 0] & ~fits).sum()
    kept = fits[:, None]
    return Supervision(
        supervision.labels, supervision.weights * kept, supervised & kept
    ), num_dropped


def predicting_tokens(anchors: Tensor, num_slots: int, num_tokens: int) -> Tensor:
    """Return [A * num_slots] where in the row the target predicts the label of each draft slot.

    The target's state at a token predicts the next one: slot k's is at anchor + k - 1.
    """
    offsets = torch.arange(num_slots, device=anchors.device)
    return (anchors[:, None] + offsets).clamp_max(num_tokens - 1).flatten()


def dpace_weights(losses: Tensor, is_supervised: Tensor) -> Tensor:
    """Return weights [A, S-1] float32 from each slot's cross-entropy, by D-PACE (arXiv 2605.18810).

    With c_k = (1 - alpha) exp(-loss_k) + alpha and alpha = 1/2, a slot weighs the products
    c_1 ... c_m of every supervised m >= k: what it is worth to get this far, and go on. Slots
    without supervision count as 1 in the products and add nothing.
    """
    confidence = (1 - _DPACE_ALPHA) * torch.exp(-losses) + _DPACE_ALPHA
    reached = torch.where(is_supervised, confidence, 1.0).cumprod(-1) * is_supervised
    return reached.flip(-1).cumsum(-1).flip(-1) * is_supervised


@torch.library.custom_op("ringdraft::head_loss", mutates_args=())
def head_loss(
    hidden: Tensor,  # [R, H]
    head: Tensor,  # [V, H]
    labels: Tensor,  # [R] int64
    is_used: Tensor,  # [R] bool
    target_hidden: Tensor | None,  # [T, H], the target's last hidden states, normed
    target_tokens: Tensor | None,  # [R] int64, which of them predicts the label
    kind: str,  # a RowLoss; all but cross-entropy need the target's
    chunk_rows: int,
    head_rows: int,  # how many are used at most: others never reach the head
    float8_head: list[Tensor],  # the fields of `Scaled` of the head, for float8 products
    target_softcap: float,  # c of the target's logits c * tanh(logits / c); 0: not capped
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [R] float32, whether argmax is the label [R] bool, d(loss)/d(hidden) [R, H].

    A row that is not used is not looked at: loss and gradient are 0, its argmax is not the label.
    """
    if head_rows < len(hidden):
        # The used rows, and others behind them up to a fixed number: no host sync.
        place = is_used.to(torch.uint8).argsort(descending=True, stable=True)[:head_rows]
        tokens = None if target_tokens is None else target_tokens[place]
        packed = head_loss(
            hidden[place], head, labels[place], is_used[place], target_hidden, tokens, kind,
            chunk_rows, head_rows, float8_head, target_softcap,
        )  # fmt: skip
        losses, is_correct, gradient = (
            part.new_zeros(len(hidden), *part.shape[1:]).index_copy_(0, place, part)
            for part in packed
        )
        return losses, is_correct, gradient
    if (kind == "cross_entropy") != (target_hidden is None):
        has = "no" if target_hidden is None else "the"
        raise ValueError(
            f"loss {kind!r} got {has} hidden states of the target; cross-entropy has none"
        )
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    is_correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    gradient = torch.empty_like(hidden)
    in_float8 = Scaled(*float8_head) if float8_head else None
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, min(start + chunk_rows, len(hidden)))
        logits, target_logits = _logits(hidden[rows], head, in_float8), None
        if in_float8 is not None and target_hidden is None:
            of_logits = float8_slopes(
                logits, labels[rows], is_used[rows], losses[rows], is_correct[rows]
            )
            gradient[rows] = head_gradient(of_logits, labels[rows], head, in_float8)
            continue
        if target_hidden is not None and target_tokens is not None:
            target_logits = target_hidden[target_tokens[rows]] @ head.T
            if target_softcap:
                target_logits.div_(target_softcap).tanh_().mul_(target_softcap)
        slopes = _slopes(
            logits, target_logits, labels[rows], is_used[rows], cast("RowLoss", kind),
            losses[rows], is_correct[rows],
        )  # fmt: skip
        torch.mm(slopes, head, out=gradient[rows])
    return losses, is_correct, gradient


def _logits(hidden: Tensor, head: Tensor, in_float8: Scaled | None) -> Tensor:
    """Return draft logits [R, V]."""
    if in_float8 is None:
        return hidden @ head.T
    rows = scaled(hidden, by_columns=False)
    return product(
        rows.rows, rows.row_scales, in_float8.rows, in_float8.row_scales, hidden.dtype
    )  # fmt: skip


def _slopes(
    logits: Tensor,
    target_logits: Tensor | None,
    labels: Tensor,
    is_used: Tensor,
    kind: RowLoss,
    losses: Tensor,
    is_correct: Tensor,
) -> Tensor:
    """Fill losses and is_correct of some rows; return d(losses)/d(logits), maybe in their place."""
    if logits.is_cuda:
        from common.drafters.dflash import loss_kernels

        if target_logits is None:
            loss_kernels.cross_entropy_in_place(logits, labels, is_used, losses, is_correct)
        else:
            loss_kernels.against_target_in_place(
                logits, target_logits, labels, is_used, losses, is_correct, kind
            )
        return logits
    is_correct.copy_((logits.argmax(-1) == labels) & is_used)
    if target_logits is None:
        found, slopes = cross_entropy(logits, labels)
    else:
        found, slopes = against_target(logits, target_logits, kind)
    losses.copy_(torch.where(is_used, found, 0.0))
    return torch.where(is_used[:, None], slopes, 0.0).to(logits.dtype)


@head_loss.register_fake
def _(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    is_used: Tensor,
    target_hidden: Tensor | None,
    target_tokens: Tensor | None,
    kind: str,
    chunk_rows: int,
    head_rows: int,
    float8_head: list[Tensor],
    target_softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del head, labels, target_hidden, target_tokens, kind, chunk_rows, head_rows, float8_head
    del target_softcap
    return (
        hidden.new_empty(len(hidden), dtype=torch.float32),
        torch.empty_like(is_used),
        torch.empty_like(hidden),
    )


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.num_float8_parts = len(inputs[-2])
    ctx.save_for_backward(output[2])


def _scale_gradient(ctx: Any, on_losses: Tensor, *_others: Tensor | None) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    weighted = (gradient * on_losses[:, None]).to(gradient.dtype)
    return weighted, *(None,) * 8, [None] * ctx.num_float8_parts, None


head_loss.register_autograd(_scale_gradient, setup_context=_keep_gradient)
