"""Drafting at inference: the context's keys and values grow, blocks come and go.

`DraftContext` holds one sequence and drafts from any of its positions; `DraftRows` holds many in
fixed buffers, each of which drafts from its own end. Nothing of a block is kept.
"""

from functools import partial

import torch
from torch import Tensor

from common.drafters.dflash.attention import (
    UNBOUNDED_WINDOW,
    BlockLayout,
    LayerWindow,
    dense_mask,
    is_visible,
)
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterSpec
from common.drafters.dflash.model import DFlashDrafter, KeysValues
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


class DraftRows:
    """Many sequences' contexts. Column j of a row holds position j, the last column padding.

    A block sees the columns before its anchor, so what lies behind is noise that nothing sees.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        embedding: Tensor,
        head: Tensor,
        *,
        num_rows: int,
        num_columns: int,
    ) -> None:
        self._drafter = drafter
        self._embedding = embedding
        self._head = head
        self._windows = _windows(drafter.spec, embedding.device)
        spec = drafter.spec
        # The heads stand first, where their keys and values are made.
        shape = (2, spec.num_kv_heads, num_rows, num_columns, spec.head_dim)
        self._layers = [embedding.new_zeros(shape) for _ in range(spec.num_layers)]
        from torch._dynamo import mark_static_address  # heavy, and not for training

        for layer in self._layers:
            mark_static_address(layer)

    @property
    def block_size(self) -> int:
        """S: slots of a block, the anchor's included."""
        return self._drafter.spec.block_size

    def append(self, aux_hidden_states: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Write aux hidden states [b, q, L*H] of rows [b] at positions [b, q]; -1 is padding."""
        fused = self._drafter.fuse(aux_hidden_states.flatten(0, 1).to(self._embedding.dtype))
        grown = self._drafter.context_keys_values(fused, positions.flatten())
        for (keys, values), (k, v) in zip(self._layers, grown, strict=True):
            keys[:, rows[:, None], positions] = k.unflatten(1, positions.shape)
            values[:, rows[:, None], positions] = v.unflatten(1, positions.shape)

    def propose(self, anchor_token_ids: Tensor, anchors: Tensor, num_columns: int) -> Tensor:
        """Return draft logits [b, S-1, V] of a block for each of the first b rows.

        Args:
            anchor_token_ids: [b] the anchors' tokens.
            anchors: [b] their positions, in front of which each row's context ends.
            num_columns: as many as the anchors need; any more change nothing.
        """
        spec = self._drafter.spec
        masks = {
            kind: _mask_of_rows(anchors, num_columns, spec.block_size, window)
            for kind, window in self._windows.items()
        }
        final = self._drafter.run_blocks(
            block_inputs(self._embedding, anchor_token_ids, spec),
            block_positions(anchors, spec.block_size),
            [(layer[0], layer[1]) for layer in self._layers],
            [partial(_attend_rows, masks[kind]) for kind in spec.layer_types],
        )
        return (final @ self._head.T).float().view(len(anchors), -1, len(self._head))

    def move(self, source: int, to: int) -> None:
        """Copy one row's context over another's."""
        for layer in self._layers:
            layer[:, :, to] = layer[:, :, source]


def _mask_of_rows(
    anchors: Tensor, num_columns: int, block_size: int, window: LayerWindow
) -> Tensor:
    """Return [b, S, C + S] bool: what the slots of each row's block see of its context and block."""
    stop = anchors.to(torch.int32)
    layout = BlockLayout(torch.zeros_like(stop), stop, num_columns, block_size)
    slots = torch.arange(len(anchors) * block_size, device=anchors.device, dtype=torch.int32)
    slots = slots.view(len(anchors), block_size)
    columns = torch.arange(num_columns, device=anchors.device, dtype=torch.int32)
    keys = torch.cat([columns.expand(len(anchors), -1), num_columns + slots], -1)
    return is_visible(layout, window, slots[:, :, None], keys[:, None])


def _attend_rows(mask: Tensor, q: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
    """Attend where row i of the contexts [n_kv, rows, columns, d] is seen by block i alone.

    Queries may lack slot 0 of each block.
    """
    num_rows, num_slots, num_keys = mask.shape
    k, v = (
        torch.cat([past[:, :num_rows, : num_keys - num_slots], own.unflatten(1, (num_rows, -1))], 2)
        for past, own in zip(context, block, strict=True)
    )
    q = q.unflatten(1, (num_rows, -1))
    repeats = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(repeats, 0).transpose(0, 1) for x in (k, v))
    mask = mask[:, None, num_slots - q.shape[2] :]
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask)
    return out.transpose(0, 1).flatten(1, 2)


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
