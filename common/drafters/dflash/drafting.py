"""Drafting at inference: the context's keys and values grow, blocks come and go.

Before every proposal the context holds exactly the positions before the anchor. Nothing of a block
is kept.
"""

from functools import partial

import torch
from torch import Tensor

from common.drafters.dflash.attention import (
    UNBOUNDED_WINDOW,
    BlockLayout,
    LayerWindow,
    dense_mask,
)
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterSpec
from common.drafters.dflash.model import DFlashDrafter
from common.drafters.dflash.objective import attend_dense, block_inputs, block_positions


class DraftContext:
    """One sequence's context in the drafter."""

    def __init__(self, drafter: DFlashDrafter, embedding: Tensor, head: Tensor) -> None:
        self._drafter = drafter
        self._embedding = embedding
        self._head = head
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._windows = _windows(drafter.spec, embedding.device)

    @property
    def num_tokens(self) -> int:
        """Positions held: 0 .. num_tokens - 1."""
        return self._layers[0][0].shape[1] if self._layers else 0

    @torch.inference_mode()
    def append(self, aux_hidden_states: Tensor) -> None:
        """Add the next positions' aux hidden states [s, L*H]."""
        start = self.num_tokens
        positions = torch.arange(
            start, start + len(aux_hidden_states), device=aux_hidden_states.device
        )
        fused = self._drafter.fuse(aux_hidden_states.to(self._embedding.dtype))
        grown = self._drafter.context_keys_values(fused, positions)
        if self._layers:
            grown = [
                (torch.cat([k, more_k], 1), torch.cat([v, more_v], 1))
                for (k, v), (more_k, more_v) in zip(self._layers, grown, strict=True)
            ]
        self._layers = grown

    @torch.inference_mode()
    def propose(self, anchor_token_ids: Tensor, anchors: Tensor) -> Tensor:
        """Return draft logits [n, S-1, V] of n blocks; block i sees the context before anchors[i].

        Args:
            anchor_token_ids: [n] the anchors' tokens.
            anchors: [n] their positions, each at most `num_tokens`.
        """
        rows = self.final_hidden_states(anchor_token_ids, anchors)
        return (rows @ self._head.T).float().view(len(anchors), -1, len(self._head))

    @torch.inference_mode()
    def final_hidden_states(self, anchor_token_ids: Tensor, anchors: Tensor) -> Tensor:
        """Return the draft slots' final hidden states [n * (S - 1), H], normed."""
        spec = self._drafter.spec
        stop = anchors.to(torch.int32)
        layout = BlockLayout(torch.zeros_like(stop), stop, self.num_tokens, spec.block_size)
        attends = {
            kind: partial(attend_dense, dense_mask(layout, window))
            for kind, window in self._windows.items()
        }
        return self._drafter.run_blocks(
            block_inputs(self._embedding, anchor_token_ids, spec),
            block_positions(anchors, spec.block_size),
            self._layers,
            [attends[kind] for kind in spec.layer_types],
        )


def _windows(spec: DrafterSpec, device: torch.device) -> dict[str, LayerWindow]:
    """Return the window of each kind of layer that the drafter has."""
    reach = {FULL_ATTENTION: UNBOUNDED_WINDOW, SLIDING_ATTENTION: spec.sliding_window}
    return {
        kind: LayerWindow(
            torch.tensor(reach[kind], device=device),
            torch.tensor(kind == SLIDING_ATTENTION, device=device),
        )
        for kind in sorted(set(spec.layer_types))
    }
