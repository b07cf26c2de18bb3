"""The replay walk over an answer that decoding wrote, and how it compares with that decoding.

    answer -> one target prefill for features -> drafts with an anchor at each token of the answer
           -> right drafts before the first wrong one -> the walk, which steps as decoding does

Nothing is decoded, so a training run can afford it on held-out rows. Here its drafts are held
against those of decoding at the same anchors: they may differ where rounding decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.metrics import replay_walk
from common.target.features import FeatureTap, run_packed
from services.evaluator.decode import Pass
from services.evaluator.ties import relative_gap

_NO_TOKEN = -1


@dataclass(frozen=True)
class Replay:
    """A walk over one answer."""

    emitted: list[int]
    """Tokens of each target pass."""
    num_ties: int
    """Drafts unlike those of decoding, where the two best logits tie."""
    num_differences: int
    """Drafts unlike those of decoding that no tie explains."""


class ReplayWalker:
    """Walks answers with one drafter."""

    def __init__(
        self, model: PreTrainedModel, tap: FeatureTap, *, tolerance: float, batch: int
    ) -> None:
        self._model = model
        self._tap = tap
        self._tolerance = tolerance
        self._batch = batch

    @torch.inference_mode()
    def walk(
        self,
        context: DraftContext,
        prompt: list[int],
        answer: list[int],
        passes: Sequence[Pass],
    ) -> Replay:
        """Walk an answer with an empty `context`; `passes` are those of decoding."""
        if not passes:
            return Replay([], num_ties=0, num_differences=0)
        token_ids = torch.tensor(prompt + answer, device=self._model.device)
        seen = token_ids[:-1]
        positions = torch.arange(len(seen), device=seen.device)
        context.append(run_packed(self._model, self._tap, seen, positions))
        live = _live_drafts(passes, len(answer) - 1, token_ids.device)
        prefixes, num_ties, num_differences = [], 0, 0
        for anchors in positions[len(prompt) :].split(self._batch):
            logits = context.propose(token_ids[anchors], anchors)
            drafts = logits.argmax(-1)
            prefixes.append(_prefix_lengths(drafts, token_ids, anchors))
            ties, differences = _count_unlike(
                logits, drafts, live[anchors - len(prompt)], self._tolerance
            )
            num_ties += ties
            num_differences += differences
        lengths = torch.cat(prefixes).tolist()
        return Replay(replay_walk(lengths, len(answer)), num_ties, num_differences)


def _prefix_lengths(drafts: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
    """Return [n] how many drafts [n, S-1] equal the text behind their anchor.

    Past the end of the text it may be any number: the walk ends there.
    """
    offsets = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    labels = token_ids[(anchors[:, None] + offsets).clamp_max(len(token_ids) - 1)]
    return (drafts == labels).to(torch.int64).cumprod(-1).sum(-1)


def _live_drafts(passes: Sequence[Pass], num_anchors: int, device: torch.device) -> Tensor:
    """Return [num_anchors, S-1] what decoding drafted behind each token, or no token."""
    live = torch.full((num_anchors, len(passes[0].draft_token_ids)), _NO_TOKEN)
    for each in passes:
        live[each.anchor] = torch.tensor(each.draft_token_ids)
    return live.to(device)


def _count_unlike(
    logits: Tensor, drafts: Tensor, live: Tensor, tolerance: float
) -> tuple[int, int]:
    """Count ties and other differences of drafts [n, S-1] and decoding's, where it drafted."""
    is_unlike = (live != drafts) & (live != _NO_TOKEN)
    if not is_unlike.any():
        return 0, 0
    gaps = relative_gap(logits[is_unlike], drafts[is_unlike], live[is_unlike])
    num_ties = int((gaps < tolerance).sum())
    return num_ties, len(gaps) - num_ties
