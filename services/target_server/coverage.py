"""Counts how much of what is trained on is supervised.

A mask that covers every token trains on prompts too; that is right for plain text alone, and has
to be asked for. It is told from the first samples, so that a run does not end with the finding.
"""

from dataclasses import dataclass

import numpy as np

from common.errors import ConfigError

SAMPLES_BEFORE_CHECK = 64


@dataclass
class MaskCoverage:
    """Supervised tokens of the samples of a pass."""

    num_samples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0

    def add(self, loss_mask: np.ndarray) -> None:
        """Count one sample. `loss_mask`: [length] uint8."""
        self.num_samples += 1
        self.num_tokens += len(loss_mask)
        self.num_supervised += int(np.count_nonzero(loss_mask))

    @property
    def fraction(self) -> float:
        """Supervised tokens of all tokens; 0 where there are none."""
        return self.num_supervised / max(self.num_tokens, 1)

    def check(self, *, allow_full_mask: bool, is_over: bool) -> None:
        """Refuse full coverage, once enough samples are counted or the pass is over."""
        if allow_full_mask or not self.num_tokens or self.num_supervised < self.num_tokens:
            return
        if is_over or self.num_samples == SAMPLES_BEFORE_CHECK:
            raise ConfigError(
                f"data: all {self.num_tokens} tokens of {self.num_samples} samples are supervised, "
                f"prompts as well; correct their loss masks, or set data.allow_full_mask=true"
            )

    def __str__(self) -> str:
        return (
            f"{self.num_supervised} of {self.num_tokens} tokens are supervised "
            f"({self.fraction:.1%})"
        )
