"""Chooses the next token of each row of a batch, from the row's own random numbers.

A row's numbers are drawn from its seed alone, so that its answer does not depend on which rows
are written beside it: an answer written again in another batch is the same answer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.target_server.generation_config import GenerationTable


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return [rows, count] float64 in [0, 1), each row by its own 64-bit seed."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def choose(logits: Tensor, uniforms: Tensor, table: GenerationTable) -> Tensor:
    """Return a token id for each row: the likeliest at temperature 0, or else a sampled one.

    Args:
        logits: [rows, V].
        uniforms: [rows] float64 in [0, 1).
    """
    if table.temperature == 0:
        return logits.argmax(-1)
    token_ids, shares = _candidates(logits.float() / table.temperature, table)
    # In float64: the sum over a whole vocabulary must not swallow its small shares.
    sums = shares.double().cumsum(-1)
    # The last sum may be below 1 by rounding, so the number is scaled to it.
    places = torch.searchsorted(sums, (uniforms[:, None] * sums[:, -1:]), right=True)
    places = places.clamp(max=sums.shape[-1] - 1)
    return (places if token_ids is None else token_ids.gather(-1, places))[:, 0]


def _candidates(logits: Tensor, table: GenerationTable) -> tuple[Tensor | None, Tensor]:
    """Return the tokens to choose from (None: every id in order) and their probabilities."""
    if table.top_k == 0 and table.top_p == 1:
        return None, logits.softmax(-1)
    count = min(table.top_k or logits.shape[-1], logits.shape[-1])
    best, token_ids = logits.topk(count, dim=-1)
    shares = best.softmax(-1)
    # A token stays where the likelier ones before it have less than top_p; the first always does.
    before = shares.cumsum(-1) - shares
    return token_ids, shares.masked_fill(before >= table.top_p, 0.0)
