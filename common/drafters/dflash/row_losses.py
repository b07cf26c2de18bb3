"""Losses of rows of logits and their slopes, in plain torch; the GPU's are in `loss_kernels`.

z are a row's draft logits, q = softmax(z), p the target's distribution, y the label:

    cross_entropy     -log q_y                               slope  q - onehot(y)
    kl                sum p (log p - log q)                  slope  q - p
    total_variation   1 - acceptance = 1/2 sum |p - q|       slope  q (s - sum q s), s = sign(q - p) / 2
    lk                share kl + (1 - share) total_variation

where acceptance = sum min(p, q), the chance that speculative sampling keeps a token of q, and lk's
share = exp(-3 acceptance) is not differentiated: far from the target it is kl, near it total variation
(Samarin et al., "LK Losses", arXiv 2602.23881, the hybrid form with its best eta).

R rows, V vocabulary; everything is computed in float32. Of bfloat16 logits, s is uncertain for tokens
whose p and q are within rounding of each other: noise in the gradient, next to nothing in the loss.
"""

from typing import Literal

import torch
from torch import Tensor

RowLoss = Literal["cross_entropy", "kl", "total_variation", "lk"]
LK_ETA = 3.0


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses [R] and slopes [R, V] of draft logits [R, V] for labels [R]."""
    log_q = logits.float().log_softmax(-1)
    label = labels[:, None]
    losses = -log_q.gather(1, label)[:, 0]
    return losses, log_q.exp_().scatter_add_(1, label, torch.full_like(log_q[:, :1], -1.0))


def against_target(logits: Tensor, target_logits: Tensor, kind: RowLoss) -> tuple[Tensor, Tensor]:
    """Return losses [R] and slopes [R, V] of draft logits to the target's, [R, V] each."""
    log_q, log_p = logits.float().log_softmax(-1), target_logits.float().log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1, keepdim=True)
    acceptance = torch.minimum(p, q).sum(-1, keepdim=True)
    side = 0.5 * (q - p).sign()
    share = _share_of_kl(kind, acceptance)
    losses = share * divergence + (1 - share) * (1 - acceptance)
    tilt = q * (side - (q * side).sum(-1, keepdim=True))
    return losses[:, 0], share * (q - p) + (1 - share) * tilt


def _share_of_kl(kind: RowLoss, acceptance: Tensor) -> Tensor:
    if kind == "lk":
        return torch.exp(-LK_ETA * acceptance)
    return torch.full_like(acceptance, 1.0 if kind == "kl" else 0.0)
