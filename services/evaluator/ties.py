"""Where two decodings of a prompt part, and whether rounding explains it.

A pass over one token and a pass over a block add in another order, so two candidates of almost
equal logit may change places. That is a float tie: counted, and no fault of the drafter's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Logits of one position in passes of other shapes agree to this part of the largest logit.
_NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


@dataclass(frozen=True)
class Difference:
    """The first position at which two answers to a prompt differ."""

    position: int
    """Index into the answer."""
    expected: int | None
    """Token of plain decoding; None where it had ended."""
    got: int | None
    """Token of speculative decoding; None where it had ended."""
    gap: float
    """How far the target's logits of the two lie apart, relative to its largest."""
    is_tie: bool


def tolerance_of(dtype: torch.dtype, setting: float) -> float:
    """Return the gap under which two logits tie: the setting, or what the dtype's noise is."""
    return setting or _NOISE[dtype]


def relative_gap(logits: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return |logit of first - logit of second| / largest |logit|, over the last dimension."""
    pair = logits.gather(-1, torch.stack([first, second], -1)).float()
    largest = logits.abs().amax(-1).float().clamp_min(1e-12)
    return (pair[..., 0] - pair[..., 1]).abs() / largest


@torch.inference_mode()
def find_difference(
    model: PreTrainedModel,
    prompt: list[int],
    expected: list[int],
    got: list[int],
    tolerance: float,
) -> Difference | None:
    """Return the first difference of two answers, judged by the target's logits there."""
    position = _first_difference(expected, got)
    if position is None:
        return None
    if position >= min(len(expected), len(got)):
        return Difference(position, *_at(expected, got, position), gap=1.0, is_tie=False)
    read = torch.tensor([prompt + got[:position]], device=model.device)
    logits = model(input_ids=read, use_cache=False, logits_to_keep=1).logits[0, -1]
    first, second = (torch.tensor(ids[position], device=logits.device) for ids in (expected, got))
    gap = relative_gap(logits, first, second).item()
    return Difference(position, expected[position], got[position], gap, gap < tolerance)


def _first_difference(first: list[int], second: list[int]) -> int | None:
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


def _at(first: list[int], second: list[int], position: int) -> tuple[int | None, int | None]:
    return (
        first[position] if position < len(first) else None,
        second[position] if position < len(second) else None,
    )
