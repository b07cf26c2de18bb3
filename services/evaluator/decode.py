"""Greedy decoding of one sequence by the target: plainly, and with drafts that it verifies.

    prompt -> prefill -> first token
    plain        one token a pass
    speculative  context += aux hidden states of what was kept
                 draft S - 1 tokens behind the anchor (the last token, not yet seen by the target)
                 one target pass over [anchor, drafts]
                 keep the drafts that equal the target's choices, and its choice behind them

Both stop behind the first stop token or at the budget. A block has all its S slots even where the
budget is nearer, so that what a draft says depends on its anchor alone. Logits never leave the
device: one small copy a pass is the only wait.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from common.drafters.dflash.drafting import DraftContext
from common.errors import CaptureMismatchError, ConfigError

_CROPPED_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TextLimit:
    """Where an answer ends."""

    stop_token_ids: frozenset[int]
    max_new_tokens: int

    def is_reached(self, token_ids: list[int]) -> bool:
        """Say whether an answer is complete."""
        return len(token_ids) >= self.max_new_tokens or token_ids[-1] in self.stop_token_ids

    def cut(self, emitted: list[int], num_before: int) -> list[int]:
        """Return what of `emitted` lies within the limit, behind `num_before` tokens."""
        emitted = emitted[: self.max_new_tokens - num_before]
        for index, token in enumerate(emitted):
            if token in self.stop_token_ids:
                return emitted[: index + 1]
        return emitted


@dataclass(frozen=True)
class PlainText:
    """An answer decoded without a drafter."""

    token_ids: list[int]
    seconds: float
    """From the first token to the last, the prefill excluded."""


@dataclass(frozen=True)
class VerifiedBlock:
    """One target pass over a block."""

    anchor: int
    """Index of the anchor in the answer."""
    draft_token_ids: list[int]
    num_emitted: int
    """Tokens that it added to the answer, the bonus included."""


@dataclass(frozen=True)
class SpeculativeText:
    """An answer decoded with a drafter."""

    token_ids: list[int]
    blocks: list[VerifiedBlock]
    seconds: float
    """From the first token to the last: the target's prefill excluded, the drafter's included."""


class Proposer(Protocol):
    """What speculative decoding needs of a drafter, for one sequence."""

    @property
    def num_tokens(self) -> int:
        """Positions that its context holds."""
        ...

    def append(self, aux_hidden_states: Tensor) -> None:
        """Add the next positions to the context."""
        ...

    def draft(self, anchor_token_id: Tensor, anchor: Tensor) -> Tensor:
        """Return the S - 1 tokens [S-1] expected behind the anchor ([1] token, [1] position)."""
        ...


class GreedyProposer:
    """The likeliest token of each slot of a DFlash block."""

    def __init__(self, context: DraftContext) -> None:
        self._context = context

    @property
    def num_tokens(self) -> int:
        """Positions that the context holds."""
        return self._context.num_tokens

    def append(self, aux_hidden_states: Tensor) -> None:
        """Add the next positions to the context."""
        self._context.append(aux_hidden_states)

    def draft(self, anchor_token_id: Tensor, anchor: Tensor) -> Tensor:
        """Return the S - 1 tokens [S-1] expected behind the anchor."""
        return self._context.propose(anchor_token_id, anchor)[0].argmax(-1)


class CachedTarget:
    """The target over one sequence, with the keys and values of the positions it has seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache = DynamicCache()

    @property
    def num_tokens(self) -> int:
        """Positions seen."""
        return self._cache.get_seq_length()

    def start(self, prompt: list[int], *, can_crop: bool = False) -> Tensor:
        """Begin a sequence; return the logits [1, V] behind its prompt."""
        self._cache = DynamicCache(config=self.model.config)
        if can_crop:
            self._cache.activate_past_recording()
        logits = self._run(torch.tensor(prompt, device=self.model.device), logits_to_keep=1)
        if can_crop:
            self.crop(len(prompt))  # sliding layers drop what lies behind their window
        return logits

    def run(self, token_ids: Tensor) -> Tensor:
        """Go on by token ids [q]; return their logits [q, V]."""
        return self._run(token_ids, logits_to_keep=0)

    def crop(self, num_tokens: int) -> None:
        """Forget all positions from `num_tokens` on."""
        self._cache.crop(num_tokens - self.num_tokens)

    def _run(self, token_ids: Tensor, logits_to_keep: int) -> Tensor:
        return self.model(
            input_ids=token_ids[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits[0]


def check_can_crop(model: PreTrainedModel) -> None:
    """Refuse a target whose layers cannot forget rejected drafts."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - set(_CROPPED_LAYERS))
    if others:
        raise ConfigError(
            f"target.model of type {model.config.model_type!r}: got layers of {', '.join(others)}, "
            f"expected {' or '.join(_CROPPED_LAYERS)}; a state that cannot be rolled back cannot "
            f"verify drafts here: evaluate in the serving engine"
        )


@torch.inference_mode()
def decode_plainly(target: CachedTarget, prompt: list[int], limit: TextLimit) -> PlainText:
    """Decode one token a pass."""
    choice = target.start(prompt).argmax(-1)
    token_ids = choice.tolist()
    start = time.perf_counter()
    while not limit.is_reached(token_ids):
        choice = target.run(choice).argmax(-1)
        token_ids += choice.tolist()
    return PlainText(token_ids, time.perf_counter() - start)


@torch.inference_mode()
def decode_speculatively(
    target: CachedTarget,
    kept_features: Callable[[], Tensor],
    proposer: Proposer,
    prompt: list[int],
    limit: TextLimit,
) -> SpeculativeText:
    """Decode a block a pass.

    Args:
        kept_features: returns the aux hidden states [q, L*H] of the target's last pass.
    """
    last = target.start(prompt, can_crop=True).argmax(-1)
    token_ids = last.tolist()
    blocks: list[VerifiedBlock] = []
    num_kept = len(prompt)
    start = time.perf_counter()
    while not limit.is_reached(token_ids):
        proposer.append(kept_features()[:num_kept])
        anchor = len(prompt) + len(token_ids) - 1
        _check_before_anchor(anchor, proposer.num_tokens, target.num_tokens)
        drafts = proposer.draft(last, torch.tensor([anchor], device=last.device))
        choices = target.run(torch.cat([last, drafts])).argmax(-1)
        drafted, chosen = _fetch(drafts, choices)
        emitted = limit.cut(chosen[: _prefix_length(drafted, chosen) + 1], len(token_ids))
        blocks.append(VerifiedBlock(len(token_ids) - 1, drafted, len(emitted)))
        token_ids += emitted
        # Kept are the old anchor and the accepted drafts; the next anchor has not been seen.
        num_kept = len(emitted)
        target.crop(anchor + num_kept)
        last = choices[num_kept - 1 : num_kept]
    return SpeculativeText(token_ids, blocks, time.perf_counter() - start)


def _fetch(drafts: Tensor, choices: Tensor) -> tuple[list[int], list[int]]:
    """Copy both to the host at once."""
    values = torch.cat([drafts, choices]).tolist()
    return values[: len(drafts)], values[len(drafts) :]


def _prefix_length(drafted: list[int], chosen: list[int]) -> int:
    """Return how many drafts equal the target's choices before the first that does not."""
    for index, token in enumerate(drafted):
        if token != chosen[index]:
            return index
    return len(drafted)


def _check_before_anchor(anchor: int, in_context: int, in_cache: int) -> None:
    if in_context != anchor or in_cache != anchor:
        raise CaptureMismatchError(
            f"block with its anchor at position {anchor}: the drafter's context holds {in_context} "
            f"positions and the target's cache {in_cache}, expected exactly those before the anchor"
        )
