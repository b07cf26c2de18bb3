"""What becomes of drafts: the rule by which a target's pass over a block accepts them.

    greedy    drafts that equal the target's choices, and its choice behind them
    sampled   draft x stays with probability min(1, p(x) / q(x)); in place of the first that does not
              comes a token of max(p - q, 0), or behind the last one of p: what is emitted has the
              distribution p, whatever q is

p is the target's distribution at temperature 1, q the drafter's, of which the draft was drawn.
b rows, S slots of a block with the anchor's, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from common.target.sampling import pick


class Drafts(NamedTuple):
    """What a drafter proposes."""

    token_ids: Tensor  # [b, S-1] int64
    shares: (
        Tensor | None
    )  # [b, S-1, V] float32: what they were drawn from; None where greedy or none


class Verdict(NamedTuple):
    """What a pass emits."""

    token_ids: Tensor  # [b, S]: noise behind the first `num_emitted` of a row
    num_emitted: Tensor  # [b]: accepted drafts and one token more


def num_uniforms(block_size: int) -> int:
    """Return how many random numbers of a row a pass takes: S - 1 to draft, S to verify."""
    return 2 * block_size - 1


def choose_drafts(logits: Tensor, uniforms: Tensor | None) -> Drafts:
    """Return drafts of logits [b, S-1, V]: the likeliest, or drawn by uniforms [b, 2S - 1]."""
    if uniforms is None:
        return Drafts(logits.argmax(-1), None)
    shares = logits.float().softmax(-1)
    return Drafts(pick(shares, uniforms[:, : shares.shape[1]]), shares)


def choose_one(logits: Tensor, uniforms: Tensor | None) -> Tensor:
    """Return a token [b] of target logits [b, V]: the likeliest, or drawn by the last uniform."""
    if uniforms is None:
        return logits.argmax(-1)
    return pick(logits.float().softmax(-1), uniforms[:, -1])


def verify(drafts: Drafts, logits: Tensor, uniforms: Tensor | None) -> Verdict:
    """Judge drafts by target logits [b, S, V] over anchor and drafts; uniforms as they were drawn by."""
    if uniforms is None:
        choices = logits.argmax(-1)
        return Verdict(choices, 1 + _prefix_lengths(drafts.token_ids == choices[:, :-1]))
    num_drafts = drafts.token_ids.shape[1]
    shares = logits.float().softmax(-1)
    drafted = shares[:, :0] if drafts.shares is None else drafts.shares
    asked = drafts.token_ids[..., None]
    p = shares[:, :-1].gather(-1, asked)[..., 0]
    q = drafted.gather(-1, asked)[..., 0]
    num_accepted = _prefix_lengths(uniforms[:, num_drafts:-1] * q < p)
    last = pick(_shares_behind(shares, drafted, num_accepted), uniforms[:, -1])
    token_ids = torch.nn.functional.pad(drafts.token_ids, (0, 1))
    return Verdict(token_ids.scatter(1, num_accepted[:, None], last[:, None]), 1 + num_accepted)


def _shares_behind(p: Tensor, q: Tensor, num_accepted: Tensor) -> Tensor:
    """Return [b, V], not normed: what the token behind the accepted drafts is drawn from."""
    rows = torch.arange(len(p), device=p.device)
    behind = p[rows, num_accepted]
    drafted = torch.nn.functional.pad(q, (0, 0, 0, 1))[rows, num_accepted]
    rest = (behind - drafted).clamp_min(0)
    # Equal but for rounding: a rejection then is rounding's, too.
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, behind)


def _prefix_lengths(is_right: Tensor) -> Tensor:
    return is_right.to(torch.int64).cumprod(-1).sum(-1)
