"""Passes over a batch of rows on the device: begin with prompts, then a block a pass.

    draft S - 1 tokens behind each row's anchor (its last token, not yet seen by the target)
    one target pass over [anchor, drafts]           every row of the batch at once
    verify; aux hidden states of the pass -> drafter's context

Without a drafter S is 1: nothing is drafted, and a pass emits the target's next token. A block has
all its S slots even where the budget is nearer, so that what a draft says depends on its anchor alone.

On a GPU shapes are fixed and the pass is compiled and replayed as CUDA graphs; on a CPU the same
code runs eagerly, over no more rows and columns than are in use. b rows in use, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.target.features import FeatureTap
from common.target.row_cache import TargetRows
from services.evaluator.compile import compile_pass
from services.evaluator.verify import (
    Drafts,
    Verdict,
    choose_drafts,
    choose_one,
    num_uniforms,
    verify,
)

_COLUMN_STEP = 64


class Proposer(Protocol):
    """What speculative decoding needs of a drafter, for a batch of rows."""

    @property
    def block_size(self) -> int:
        """S."""
        ...

    def append(self, aux_hidden_states: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Add aux hidden states [b, q, L*H] at positions [b, q] to rows [b]; -1 is padding."""
        ...

    def propose(self, anchor_token_ids: Tensor, anchors: Tensor, num_columns: int) -> Tensor:
        """Return draft logits [b, S-1, V] behind the anchors [b] of the first b rows."""
        ...

    def move(self, source: int, to: int) -> None:
        """Copy one row over another."""
        ...


class Emitted(NamedTuple):
    """What one pass says of the rows in use, on the host."""

    token_ids: list[list[int]]
    """Emitted tokens of each row, before any cut."""
    draft_token_ids: list[list[int]]


class Passes:
    """The target and, perhaps, a drafter over `num_rows` rows. For one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_rows: int,
        num_columns: int,
        tap: FeatureTap | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """`num_columns` is of `num_columns_for`, the proposer's too; `tap` is the proposer's."""
        self.num_rows = num_rows
        self.is_fixed = model.device.type == "cuda"
        self.block_size = proposer.block_size if proposer else 1
        self._num_columns = num_columns
        self._device = model.device
        self._target = TargetRows(model, num_rows, self._num_columns)
        self._tap = tap
        self._proposer = proposer
        self._run: Callable[..., tuple[Verdict, Tensor]] = (
            compile_pass(self._pass) if self.is_fixed else self._pass
        )

    @property
    def num_uniforms(self) -> int:
        """Random numbers that a row takes a pass, where tokens are sampled."""
        return num_uniforms(self.block_size)

    def start(
        self, prompts: list[list[int]], rows: list[int], uniforms: Tensor | None
    ) -> list[int]:
        """Begin rows anew with prompts; return the first token of each answer."""
        places = torch.tensor(rows, device=self._device)
        logits, positions = self._target.start(prompts, places)
        if self._tap and self._proposer:
            self._proposer.append(self._tap.aux_hidden_states_of_batch(), places, positions)
        return choose_one(logits, self._on_device(uniforms)).tolist()

    def go_on(
        self, last_token_ids: list[int], positions: list[int], uniforms: Tensor | None
    ) -> Emitted:
        """Run a block of each of the first rows behind its last token, which stands at `positions`.

        Args:
            uniforms: [b, 2S - 1] float64, or None to decode greedily.
        """
        longest = max(positions) + self.block_size
        num_columns = self._num_columns if self.is_fixed else _whole_steps(longest)
        verdict, drafts = self._run(
            torch.tensor(last_token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            self._on_device(uniforms),
            num_columns,
        )
        # One copy to the host a pass; it is what the host waits for.
        fetched = torch.cat([verdict.num_emitted[:, None], verdict.token_ids, drafts], 1).tolist()
        size = self.block_size
        return Emitted(
            [row[1 : 1 + row[0]] for row in fetched], [row[1 + size :] for row in fetched]
        )

    def move(self, source: int, to: int) -> None:
        """Copy all that is known of one row over another."""
        self._target.move(source, to)
        if self._proposer:
            self._proposer.move(source, to)

    def _pass(
        self, last: Tensor, anchors: Tensor, uniforms: Tensor | None, num_columns: int
    ) -> tuple[Verdict, Tensor]:
        positions = anchors[:, None] + torch.arange(self.block_size, device=anchors.device)
        drafts = self._draft(last, anchors, uniforms, num_columns)
        block = torch.cat([last[:, None], drafts.token_ids], 1)
        logits = self._target.go_on(block, positions, num_columns)
        if self._tap and self._proposer:
            # Behind what is kept comes noise, which the next pass overwrites before it is seen.
            rows = torch.arange(len(anchors), device=anchors.device)
            self._proposer.append(self._tap.aux_hidden_states_of_batch(), rows, positions)
        return verify(drafts, logits, uniforms), drafts.token_ids

    def _draft(
        self, last: Tensor, anchors: Tensor, uniforms: Tensor | None, num_columns: int
    ) -> Drafts:
        if self._proposer is None:
            return Drafts(last.new_empty(len(last), 0), None)
        return choose_drafts(self._proposer.propose(last, anchors, num_columns), uniforms)

    def _on_device(self, uniforms: Tensor | None) -> Tensor | None:
        return None if uniforms is None else uniforms.to(self._device)


def num_columns_for(num_tokens: int) -> int:
    """Return the columns that rows of `num_tokens` need: whole steps, with one for padding."""
    return _whole_steps(num_tokens + 1)


def _whole_steps(num_columns: int) -> int:
    return -(-num_columns // _COLUMN_STEP) * _COLUMN_STEP
