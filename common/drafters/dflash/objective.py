"""One row to one loss: anchors, mask, blocks, network, head. Fixed shapes, no host sync.

The same function is the oracle on the CPU (SDPA under a dense mask) and the graph on the GPU (kernels
for these blocks).
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from common.drafters.dflash.anchors import select_anchors
from common.drafters.dflash.attention import (
    UNBOUNDED_WINDOW,
    BlockLayout,
    LayerWindow,
    dense_mask,
    make_layout,
    sdpa,
)
from common.drafters.dflash.block_attention import attend_blocks
from common.drafters.dflash.config import (
    SLIDING_ATTENTION,
    DrafterSpec,
    LossName,
    Precision,
    needs_target,
)
from common.drafters.dflash.float8_products import scaled
from common.drafters.dflash.loss import (
    Supervision,
    dpace_weights,
    fit_blocks,
    head_loss,
    predicting_tokens,
    supervise,
)
from common.drafters.dflash.metrics import pack_sums
from common.drafters.dflash.model import Attend, DFlashDrafter, KeysValues, draft_rows

AttentionBackend = Literal["dense", "blocks"]
_HEAD_TILE = 128


class StagedRow(NamedTuple):
    """A row in a worker's static buffers."""

    token_ids: Tensor  # [T] int32
    document_ids: Tensor  # [T] int32, -1 on padding
    position_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    aux_hidden_states: Tensor  # [T, L*H], the network's dtype
    draw: Tensor  # [3] int64: seed, sequence, visit
    last_hidden_states_normed: Tensor | None = None  # [T, H], for losses against the target


class DFlashObjective(nn.Module):
    """Weighted loss of a row's blocks, as a sum; divide by the weights after reductions."""

    windows: Tensor
    causal: Tensor
    decay: Tensor

    def __init__(
        self,
        drafter: DFlashDrafter,
        *,
        embedding: Tensor,  # [V, H], the target's, frozen
        head: Tensor,  # [V, H], the target's, frozen
        num_anchors: int,
        max_documents: int,
        loss_chunk_rows: int,
        backend: AttentionBackend,
        head_rows: int = 0,
        loss: LossName = "cross_entropy",
        precision: Precision = "bf16",
        target_softcap: float = 0.0,
    ) -> None:
        super().__init__()
        spec = drafter.spec
        self.drafter = drafter
        self.embedding = embedding
        self.head = head
        self.num_anchors = num_anchors
        self.max_documents = max_documents
        self.loss_chunk_rows = loss_chunk_rows
        self.head_rows = head_bucket(head_rows, num_anchors * spec.num_draft_tokens)
        self.backend = backend
        self.loss = loss
        self.target_softcap = target_softcap
        self.layer_kinds = [int(kind == SLIDING_ATTENTION) for kind in spec.layer_types]
        windows = torch.tensor([UNBOUNDED_WINDOW, spec.sliding_window or 1], dtype=torch.int32)
        self.float8_head = list(scaled(head)) if precision == "fp8" else []
        self.register_buffer("windows", windows, persistent=False)
        self.register_buffer("causal", torch.tensor([False, True]), persistent=False)
        self.register_buffer("decay", torch.tensor(spec.decay()), persistent=False)

    def forward(self, row: StagedRow) -> tuple[Tensor, Tensor]:
        """Return the loss sum (0-dim float32, differentiable) and the packed sums."""
        anchors, is_valid = select_anchors(
            row.loss_mask, row.document_ids, row.draw, self.num_anchors, self.max_documents
        )
        final = self.draft(row, anchors, is_valid)
        supervision, num_dropped = fit_blocks(
            supervise(
                row.token_ids, row.document_ids, row.loss_mask, anchors, is_valid, self.decay
            ),
            self.head_rows,
        )
        losses, is_correct = self._losses(final, row, anchors, supervision)
        weights = supervision.weights
        if self.loss == "dpace":
            weights = dpace_weights(losses.detach(), supervision.is_supervised)
        loss = (weights * losses).sum()
        return loss, pack_sums(loss, weights, is_correct, supervision.is_supervised, num_dropped)

    def draft(self, row: StagedRow, anchors: Tensor, is_valid: Tensor) -> Tensor:
        """Return the draft rows' final hidden states [A * (S - 1), H] of blocks at the anchors."""
        spec = self.drafter.spec
        layout = make_layout(anchors, is_valid, row.position_ids, spec.block_size)
        return self.drafter(
            row.aux_hidden_states,
            row.position_ids,
            block_inputs(self.embedding, row.token_ids[anchors], spec),
            block_positions(row.position_ids[anchors], spec.block_size),
            self.attends(layout),
        )

    @torch.no_grad()
    def right_drafts(
        self, row: StagedRow, anchors: Tensor, is_valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return which greedy draft tokens are the text's, and which slots have a text: [A, S-1] bool.

        Args:
            anchors: [A] int64, ascending, as many as `num_anchors`; those that are not valid behind.
        """
        final = self.draft(row, anchors, is_valid)
        supervision = supervise(
            row.token_ids, row.document_ids, row.loss_mask, anchors, is_valid, self.decay
        )
        chosen = [(rows @ self.head.T).argmax(-1) for rows in final.split(self.loss_chunk_rows)]
        is_right = torch.cat(chosen).view(supervision.labels.shape) == supervision.labels
        return is_right & supervision.is_supervised, supervision.is_supervised

    def _losses(
        self, final: Tensor, row: StagedRow, anchors: Tensor, supervision: Supervision
    ) -> tuple[Tensor, Tensor]:
        """Return each slot's loss and whether its draft is right, [A, S-1] both."""
        against_target = needs_target(self.loss)
        num_slots = self.drafter.spec.num_draft_tokens
        losses, is_correct, _ = head_loss(
            final,
            self.head,
            supervision.labels.flatten(),
            supervision.is_supervised.flatten(),
            row.last_hidden_states_normed if against_target else None,
            predicting_tokens(anchors, num_slots, len(row.token_ids)) if against_target else None,
            self.loss if against_target else "cross_entropy",
            self.loss_chunk_rows,
            self.head_rows,
            self.float8_head,
            self.target_softcap,
        )
        return losses.view(-1, num_slots), is_correct.view(-1, num_slots)

    def attends(self, layout: BlockLayout) -> list[Attend]:
        kinds = {kind: self._attend(layout, kind) for kind in sorted(set(self.layer_kinds))}
        return [kinds[kind] for kind in self.layer_kinds]

    def _attend(self, layout: BlockLayout, kind: int) -> Attend:
        window = LayerWindow(self.windows[kind], self.causal[kind])
        if self.backend == "dense":
            return partial(attend_dense, dense_mask(layout, window))
        return partial(attend_blocks, layout, window)


def head_bucket(head_rows: int, num_rows: int) -> int:
    """Return how many rows reach the head: all, or as many as asked for, up to a whole tile."""
    whole = -(-head_rows // _HEAD_TILE) * _HEAD_TILE
    return min(whole, num_rows) if head_rows else num_rows


def block_inputs(embedding: Tensor, anchor_token_ids: Tensor, spec: DrafterSpec) -> Tensor:
    """Return the distinct inputs of blocks [A + 1, H]: anchors' embeddings, then the mask token's."""
    ids = nn.functional.pad(anchor_token_ids.to(torch.int64), (0, 1), value=spec.mask_token_id)
    return nn.functional.embedding(ids, embedding)


def block_positions(anchor_positions: Tensor, block_size: int) -> Tensor:
    """Return positions [A*S]: slot k has its anchor's position + k."""
    slots = torch.arange(block_size, device=anchor_positions.device, dtype=anchor_positions.dtype)
    return (anchor_positions[:, None] + slots).flatten()


def attend_dense(mask: Tensor, q: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
    """Attend under a dense mask [Q, K] given first, so that `partial` makes an `Attend` of it.

    Queries may lack slot 0 of each block.
    """
    num_slots, num_queries = len(mask), q.shape[1]
    if num_queries < num_slots:
        mask = draft_rows(num_slots // (num_slots - num_queries), mask)
    k, v = (torch.cat(pair, 1) for pair in zip(context, block, strict=True))
    return sdpa(q, k, v, mask)
