"""Decodes a list of prompts in batches, each row at its own pace, to texts with a record of passes.

    waiting prompts --> a row each, prefilled --> a pass over all rows in use, again and again
                             ^                        |
                             '---- rows that have ended make room

An answer ends behind the first stop token or at the budget. Where nothing waits, a CPU goes on with
fewer rows, and a GPU, whose passes have one shape, with idle ones.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.target.sampling import draw_uniforms
from services.evaluator.passes import Passes


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
class Request:
    """A prompt, and what its answer is drawn from where it is sampled."""

    token_ids: list[int]
    seed: int = 0
    """64-bit seed of this answer alone."""


@dataclass(frozen=True)
class Pass:
    """One target pass over the block of one row."""

    anchor: int
    """Index of the anchor in the answer."""
    draft_token_ids: list[int]
    num_emitted: int
    """Tokens that it added to the answer, the target's own included."""
    seconds: float
    """The row's share of the pass: its time over the rows that were in use."""


@dataclass(frozen=True)
class Text:
    """An answer. Its first token comes of the prefill, the others of passes."""

    token_ids: list[int]
    passes: list[Pass] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Its share of all passes; the target's prefill is excluded, the drafter's work included."""
        return sum(each.seconds for each in self.passes)


@dataclass
class _Row:
    """A text under way."""

    request: int
    """Index of its request."""
    num_prompt_tokens: int
    uniforms: Tensor | None
    """[max_new_tokens, 2S - 1] float64."""
    token_ids: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the last token, which the target has not seen."""
        return self.num_prompt_tokens + len(self.token_ids) - 1

    @property
    def num_taken(self) -> int:
        """Rows of `uniforms` that are used up; each pass emits a token, so they suffice."""
        return len(self.passes) + bool(self.token_ids)


class BatchDecoder:
    """Decodes with one `Passes`. Owner: one thread, one call at a time."""

    def __init__(self, passes: Passes, limit: TextLimit, *, is_sampled: bool = False) -> None:
        self._passes = passes
        self._limit = limit
        self._is_sampled = is_sampled

    @torch.no_grad()
    def warm_up(self, requests: Sequence[Request], num_passes: int) -> None:
        """Run a few passes for nobody: what is lazy, compiled or captured is done behind them."""
        rows: list[_Row] = []
        self._begin(rows, list(enumerate(requests[: self._passes.num_rows])), range(len(requests)))
        for _ in range(min(num_passes, self._limit.max_new_tokens - 1)):
            self._advance(rows)

    @torch.no_grad()
    def decode(
        self,
        requests: Sequence[Request],
        stop: threading.Event,
        on_pass: Callable[[int], None] = lambda _: None,
    ) -> list[Text] | None:
        """Return the answers in order; None where `stop` came first.

        Args:
            on_pass: told before each pass how many answers the one before has ended.
        """
        texts: dict[int, Text] = {}
        waiting = deque(enumerate(requests))
        rows: list[_Row] = []
        while rows or waiting:
            if stop.is_set():
                return None
            ended = [slot for slot, row in enumerate(rows) if self._limit.is_reached(row.token_ids)]
            for slot in ended:
                texts[rows[slot].request] = Text(rows[slot].token_ids, rows[slot].passes)
            on_pass(len(ended))
            if self._seat(rows, ended, waiting):
                continue  # an answer may be its first token alone
            if rows:
                self._advance(rows)
        return [texts[number] for number in range(len(requests))]

    def _seat(
        self, rows: list[_Row], ended: list[int], waiting: deque[tuple[int, Request]]
    ) -> bool:
        """Give the places of ended rows to waiting prompts, or close the gaps; say whether any came."""
        free = [*ended, *range(len(rows), self._passes.num_rows)]
        taken = free[: len(waiting)]
        for gap in sorted(set(ended) - set(taken), reverse=True):
            last = len(rows) - 1
            if gap != last:
                self._passes.move(last, gap)
                rows[gap] = rows[last]
            rows.pop()
        if taken:
            self._begin(rows, [waiting.popleft() for _ in taken], taken)
        return bool(taken)

    def _begin(
        self, rows: list[_Row], requests: Sequence[tuple[int, Request]], slots: Sequence[int]
    ) -> None:
        begun = [
            _Row(number, len(request.token_ids), self._draw(request))
            for number, request in requests
        ]
        first = self._passes.start(
            [request.token_ids for _, request in requests],
            list(slots[: len(requests)]),
            self._uniforms(begun),
        )
        for slot, row, token in zip(slots, begun, first, strict=False):
            row.token_ids.append(token)
            rows[slot : slot + 1] = [row]

    def _advance(self, rows: list[_Row]) -> None:
        """Run one pass and add what it emits to each row."""
        start = time.perf_counter()
        # Rows that nobody asked for repeat the first, for the one shape of compiled passes.
        spare = self._passes.num_rows - len(rows) if self._passes.is_fixed else 0
        batch = [*rows, *rows[:1] * spare]
        emitted = self._passes.go_on(
            [row.token_ids[-1] for row in batch],
            [row.position for row in batch],
            self._uniforms(batch),
        )
        seconds = (time.perf_counter() - start) / len(rows)
        for row, tokens, drafts in zip(rows, *emitted, strict=False):
            anchor = len(row.token_ids) - 1
            kept = self._limit.cut(tokens, len(row.token_ids))
            row.passes.append(Pass(anchor, drafts, len(kept), seconds))
            row.token_ids += kept

    def _draw(self, request: Request) -> Tensor | None:
        if not self._is_sampled:
            return None
        width = self._passes.num_uniforms
        numbers = draw_uniforms([request.seed], self._limit.max_new_tokens * width)
        return numbers.view(-1, width)

    def _uniforms(self, rows: Sequence[_Row]) -> Tensor | None:
        """Return what each row draws its next pass from; its prefill takes the first numbers."""
        drawn = [row.uniforms[row.num_taken] for row in rows if row.uniforms is not None]
        return torch.stack(drawn) if drawn else None
