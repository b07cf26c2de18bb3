"""Draws tokens for each row of a batch, from the row's own random numbers.

A row's numbers are drawn from its seed alone, so that its answer does not depend on which rows
are written beside it: an answer written again in another batch is the same answer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return [rows, count] float64 in [0, 1), each row by its own 64-bit seed."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def pick(shares: Tensor, uniforms: Tensor) -> Tensor:
    """Return an index into the last dimension [...] for shares [..., V], which need no common sum.

    Args:
        uniforms: [...] float64 in [0, 1).
    """
    # In float64: the sum over a whole vocabulary must not swallow its small shares.
    sums = shares.double().cumsum(-1)
    # The last sum may be off 1 by rounding, so the number is scaled to it.
    places = torch.searchsorted(sums, uniforms[..., None] * sums[..., -1:], right=True)
    return places[..., 0].clamp(max=sums.shape[-1] - 1)
