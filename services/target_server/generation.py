"""Writes answers with the target: batched decoding over a static cache.

    prompts, padded on the left -> one prefill -> a pass a token, until every row has ended

Padding is masked out and positions start behind it, so that a greedy answer does not depend on
its neighbours beyond rounding. The cache has one shape for many batches: on a GPU the pass of one
token is compiled once and replayed as a CUDA graph; on a CPU the same code runs eagerly.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from common.target.features import FeatureTap
from common.target.sampling import draw_uniforms
from common.target.turns import end_of_turn_ids, pad_left
from services.target_server.generation_config import GenerationTable
from services.target_server.sampling import choose

_CACHE_STEP = 256
# Reading on the host which rows have ended makes a GPU wait.
_STEPS_BETWEEN_LOOKS = 16


@dataclass(frozen=True)
class Request:
    """A prompt, and what its answer is drawn from."""

    token_ids: list[int]
    seed: int
    """64-bit seed of this answer alone."""
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """What the target wrote, and whether it stopped by itself ("stop") or was cut ("length")."""

    token_ids: list[int]
    """Includes the token that ends the turn where the target wrote it."""
    finish_reason: str


class AnswerWriter:
    """A target that answers one batch a call; not for use from two threads."""

    def __init__(
        self, model: PreTrainedModel, table: GenerationTable, tap: FeatureTap | None = None
    ) -> None:
        """`tap` is lifted off the model while answers are written."""
        self._model = model
        self._table = table
        self._tap = tap
        self._end_ids = torch.tensor(sorted(end_of_turn_ids(model)), device=model.device)
        self._is_compiled = model.device.type == "cuda"
        self._cache: StaticCache | None = None
        self._cache_shape = (0, 0)

    @property
    def batch_size(self) -> int:
        """Requests that one call answers best."""
        return self._table.batch_size

    def answer(self, requests: Sequence[Request], stop: threading.Event) -> list[Answer] | None:
        """Write an answer to each of at most `batch_size` requests; None where `stop` came first."""
        lifted = self._tap.lifted() if self._tap else contextlib.nullcontext()
        with torch.no_grad(), lifted:
            written = self._write(requests, stop)
        if written is None:
            return None
        ends = set(self._end_ids.tolist())
        return [
            _cut(row, ends, request.max_new_tokens)
            for row, request in zip(written, requests, strict=False)
        ]

    def _write(self, requests: Sequence[Request], stop: threading.Event) -> list[list[int]] | None:
        """Return the tokens of each row up to a common length; what is past an end is noise."""
        device = self._model.device
        num_steps = max(request.max_new_tokens for request in requests)
        # A compiled pass has one shape: rows that nobody asked for repeat the first.
        spare = self._table.batch_size - len(requests) if self._is_compiled else 0
        rows = [*requests, *[requests[0]] * spare]
        token_ids, is_prompt = pad_left([row.token_ids for row in rows], int(self._end_ids[0]))
        uniforms = draw_uniforms([row.seed for row in rows], num_steps).to(device)
        limits = torch.tensor([row.max_new_tokens for row in rows], device=device)
        decoding = _Decoding(
            self._model, self._empty_cache(len(rows), token_ids.shape[1] + num_steps),
            token_ids.to(device), is_prompt.to(device), self._step(),
        )  # fmt: skip
        has_ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        written: list[Tensor] = []
        logits = decoding.start()
        for step in range(num_steps):
            chosen = choose(logits, uniforms[:, step], self._table)
            written.append(chosen)
            has_ended |= torch.isin(chosen, self._end_ids) | (step + 1 >= limits)
            if step + 1 == num_steps or (self._looks_at(step) and bool(has_ended.all())):
                break
            if stop.is_set():
                return None
            logits = decoding.go_on(chosen)
        return torch.stack(written, dim=1).tolist()

    def _looks_at(self, step: int) -> bool:
        return not self._is_compiled or step % _STEPS_BETWEEN_LOOKS == _STEPS_BETWEEN_LOOKS - 1

    def _step(self) -> Callable:
        return self._model.get_compiled_call(None) if self._is_compiled else self._model

    def _empty_cache(self, rows: int, length: int) -> StaticCache:
        """Return the cache of the batch before where it fits, or else a larger one."""
        fits = self._cache_shape[0] == rows and self._cache_shape[1] >= length
        if self._cache is not None and fits:
            self._cache.reset()
            return self._cache
        length = -(-length // _CACHE_STEP) * _CACHE_STEP
        self._cache = None  # frees its memory before the next one takes as much
        self._cache = StaticCache(config=self._model.config, max_cache_len=length)
        self._cache_shape = (rows, length)
        return self._cache


class _Decoding:
    """One batch under way: prefill, then a token a row and pass."""

    def __init__(
        self, model: PreTrainedModel, cache: StaticCache, token_ids: Tensor, is_prompt: Tensor,
        step: Callable,
    ) -> None:  # fmt: skip
        self._model, self._cache, self._step = model, cache, step
        self._token_ids, self._is_prompt = token_ids, is_prompt
        self._positions = is_prompt.sum(-1, keepdim=True) - 1  # [rows, 1], of the last token seen
        num_behind = cache.get_max_length() - token_ids.shape[1]
        # Slots behind the prompt are open to all; causality keeps them shut until they are filled.
        self._mask = torch.nn.functional.pad(is_prompt, (0, num_behind), value=1)

    def start(self) -> Tensor:
        """Run the prompts; return the logits [rows, V] behind them."""
        return self._model(
            input_ids=self._token_ids,
            attention_mask=self._is_prompt,
            position_ids=(self._is_prompt.cumsum(-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def go_on(self, token_ids: Tensor) -> Tensor:
        """Run one token [rows] more; return the logits [rows, V] behind it."""
        self._positions = self._positions + 1
        return self._step(
            input_ids=token_ids[:, None],
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]


def _cut(row: list[int], ends: set[int], limit: int) -> Answer:
    row = row[:limit]
    stop = next((i for i, token in enumerate(row) if token in ends), None)
    return Answer(row, "length") if stop is None else Answer(row[: stop + 1], "stop")
