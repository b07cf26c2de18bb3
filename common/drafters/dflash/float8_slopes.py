"""The slopes of cross-entropy in float8, and the gradient of hidden rows that the head makes of them.

    d_h = sum over v of q_v w_v - w_y  =  (q_y - 1) w_y  +  sum over v != y of q_v w_v

The label's term is exact: float8 is a few percent off, and near the label q_y - 1 would be lost in the
rounding of q_y. The other chances q_v are in float8 by their rows, and the head by its columns.

R rows, V vocabulary, H hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from common.drafters.dflash.float8_products import Scaled, product, scaled
from common.drafters.dflash.row_losses import cross_entropy


class Slopes(NamedTuple):
    """d(cross-entropy)/d(logits); zeros in rows that are not used."""

    others: Tensor  # [R, V] float8, 0 at the label
    scales: Tensor  # [R, 1] float32
    of_label: Tensor  # [R] float32


def float8_slopes(
    logits: Tensor,  # [R, V]
    labels: Tensor,  # [R] int64
    is_used: Tensor,  # [R] bool
    losses: Tensor,  # [R] float32; on return the loss, 0 in rows that are not used
    is_correct: Tensor,  # [R] bool; on return argmax == label, False in rows that are not used
) -> Slopes:
    """Return the slopes of rows of logits, and fill what else is known of them."""
    if logits.is_cuda:
        from common.drafters.dflash import loss_kernels

        out = Slopes(
            torch.empty_like(logits, dtype=torch.float8_e4m3fn),
            logits.new_empty(len(logits), 1, dtype=torch.float32),
            logits.new_empty(len(logits), dtype=torch.float32),
        )
        loss_kernels.cross_entropy_in_float8(
            logits, labels, is_used, losses, is_correct, out.others, out.scales, out.of_label
        )
        return out
    is_correct.copy_((logits.argmax(-1) == labels) & is_used)
    found, slopes = cross_entropy(logits, labels)
    losses.copy_(torch.where(is_used, found, 0.0))
    slopes = torch.where(is_used[:, None], slopes, 0.0)
    of_label = slopes.gather(1, labels[:, None])[:, 0]
    others = scaled(slopes.scatter(1, labels[:, None], 0.0), by_columns=False)
    return Slopes(others.rows, others.row_scales, of_label)


def head_gradient(slopes: Slopes, labels: Tensor, head: Tensor, in_float8: Scaled) -> Tensor:
    """Return d(loss)/d(hidden) [R, H] in the head's dtype [V, H]."""
    others = product(
        slopes.others, slopes.scales, in_float8.columns, in_float8.column_scales, head.dtype,
        is_sum_exact=True,
    )  # fmt: skip
    return others.addcmul_(head[labels], slopes.of_label[:, None].to(head.dtype))
