"""The hand-written alignment table: which label, which context, which gradient belongs to which slot.

ids 0..19 are the first sample, anchors 2 and 7; ids 20..29 the second, anchor 24; block size 4

anchor 2   slots 1 2 3 -> tokens 3 4 5     sees features 0 1
anchor 7   slots 1 2 3 -> tokens 8 9 10    sees features 0 .. 6
anchor 24  slots 1 2 3 -> tokens 25 26 27  sees features 20 .. 23
"""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.attention import (
    UNBOUNDED_WINDOW,
    LayerWindow,
    dense_mask,
    make_layout,
)
from common.drafters.dflash.config import DrafterSpec
from common.drafters.dflash.loss import Supervision, head_loss, supervise
from common.drafters.dflash.model import DFlashDrafter
from common.drafters.dflash.objective import (
    DFlashObjective,
    StagedRow,
    block_inputs,
    block_positions,
)
from tests.drafters import make_drafter, make_row, make_spec, make_tables

BLOCK_SIZE = 4
NUM_TOKENS = 32
ANCHORS = (2, 7, 24, 0)
IS_VALID = (True, True, True, False)
LABELS = {2: [3, 4, 5], 7: [8, 9, 10], 24: [25, 26, 27]}
CONTEXT = {2: range(2), 7: range(7), 24: range(20, 24)}


def sample_row() -> StagedRow:
    """Return the two samples, all of them supervised, and two tokens of padding."""
    spec = make_spec(block_size=BLOCK_SIZE)
    row = make_row(spec, (20, 10), NUM_TOKENS, num_prompt=0)
    return row._replace(token_ids=torch.arange(NUM_TOKENS, dtype=torch.int32))


def supervision_of(row: StagedRow, spec: DrafterSpec) -> Supervision:
    return supervise(
        row.token_ids, row.document_ids, row.loss_mask, torch.tensor(ANCHORS),
        torch.tensor(IS_VALID), torch.tensor(spec.decay()),
    )  # fmt: skip


def loss_of(
    row: StagedRow, drafter: DFlashDrafter, aux: Tensor, num_blocks: int = len(ANCHORS)
) -> tuple[Tensor, Tensor]:
    """Return the loss over the first blocks of the table and their final hidden states [A * (S-1), H]."""
    spec = drafter.spec
    embedding, head = make_tables(spec)
    anchors, is_valid = torch.tensor(ANCHORS)[:num_blocks], torch.tensor(IS_VALID)[:num_blocks]
    layout = make_layout(anchors, is_valid, row.position_ids, BLOCK_SIZE)
    window = LayerWindow(torch.tensor(UNBOUNDED_WINDOW), torch.tensor(False))
    objective = DFlashObjective(
        drafter, embedding=embedding, head=head, num_anchors=num_blocks, max_documents=4,
        loss_chunk_rows=5, backend="dense",
    )  # fmt: skip
    assert torch.equal(dense_mask(layout, window), objective.attends(layout)[0].args[0])
    final = drafter(
        aux, row.position_ids, block_inputs(embedding, row.token_ids[anchors], spec),
        block_positions(row.position_ids[anchors], BLOCK_SIZE), objective.attends(layout),
    )  # fmt: skip
    final.retain_grad()
    labels, weights, is_supervised = (part[:num_blocks] for part in supervision_of(row, spec))
    losses, _, _ = head_loss(
        final, head, labels.flatten(), is_supervised.flatten(),
        None, None, "cross_entropy", 5, len(final), [], 0.0,
    )  # fmt: skip
    return (losses * weights.flatten()).sum(), final


@pytest.fixture
def drafter() -> DFlashDrafter:
    return make_drafter(make_spec(block_size=BLOCK_SIZE))


def test_label_at_slot_j_is_the_token_at_anchor_plus_j() -> None:
    labels, weights, _ = supervision_of(sample_row(), make_spec(block_size=BLOCK_SIZE))
    for index, anchor in enumerate(ANCHORS[:3]):
        assert labels[index].tolist() == LABELS[anchor]
        assert (weights[index] > 0).all()
    assert not weights[3].any(), "the padding block weighs nothing"


def test_no_query_sees_tokens_at_or_past_its_anchor_or_another_block() -> None:
    row = sample_row()
    layout = make_layout(
        torch.tensor(ANCHORS), torch.tensor(IS_VALID), row.position_ids, BLOCK_SIZE
    )
    mask = dense_mask(layout, LayerWindow(torch.tensor(UNBOUNDED_WINDOW), torch.tensor(False)))
    for index, anchor in enumerate(ANCHORS):
        own = list(range(NUM_TOKENS + 4 * index, NUM_TOKENS + 4 * index + 4))
        context = list(CONTEXT[anchor]) if IS_VALID[index] else []
        for slot in range(BLOCK_SIZE):
            assert mask[4 * index + slot].nonzero().flatten().tolist() == context + own


def test_the_padding_block_has_no_gradient_and_every_other_draft_slot_has(
    drafter: DFlashDrafter,
) -> None:
    row = sample_row()
    loss, final = loss_of(row, drafter, row.aux_hidden_states)
    loss.backward()
    assert torch.isfinite(loss)
    has_gradient = final.grad.view(4, BLOCK_SIZE - 1, -1).abs().amax(-1) > 0
    assert has_gradient.tolist() == [[True] * 3] * 3 + [[False] * 3]


def test_features_have_a_gradient_exactly_before_the_anchors_of_their_sample(
    drafter: DFlashDrafter,
) -> None:
    row = sample_row()
    aux = row.aux_hidden_states.clone().requires_grad_()
    loss_of(row, drafter, aux)[0].backward()
    touched = (aux.grad.abs().amax(-1) > 0).nonzero().flatten().tolist()
    assert touched == [*range(7), *range(20, 24)]


def test_drafts_do_not_change_with_features_at_or_past_their_anchor(
    drafter: DFlashDrafter,
) -> None:
    row = sample_row()
    _, final = loss_of(row, drafter, row.aux_hidden_states)
    changed = row.aux_hidden_states.clone()
    changed[2:20] += 1.0
    _, other = loss_of(row, drafter, changed)
    blocks, others = final.view(4, BLOCK_SIZE - 1, -1), other.view(4, BLOCK_SIZE - 1, -1)
    torch.testing.assert_close(blocks[0], others[0])
    torch.testing.assert_close(blocks[2:], others[2:])
    assert (blocks[1] - others[1]).abs().max() > 1e-3, "anchor 7 sees features 2 to 6"


def test_padding_block_changes_neither_loss_nor_gradient(drafter: DFlashDrafter) -> None:
    row = sample_row()
    gradients = []
    for num_blocks in (3, 4):
        drafter.zero_grad()
        loss, _ = loss_of(row, drafter, row.aux_hidden_states, num_blocks)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for without, with_padding in zip(*gradients, strict=True):
        torch.testing.assert_close(without, with_padding, rtol=1e-4, atol=1e-4)


def test_loss_is_finite_for_any_length_and_number_of_anchors(drafter: DFlashDrafter) -> None:
    spec = drafter.spec
    embedding, head = make_tables(spec)
    for index in range(200):
        length, num_anchors = 1 + (index * 37) % 300, 1 + index % 17
        objective = DFlashObjective(
            drafter, embedding=embedding, head=head, num_anchors=num_anchors, max_documents=4,
            loss_chunk_rows=16, backend="dense",
        )  # fmt: skip
        loss, sums = objective(make_row(spec, (length,), length + index % 3, seed=index))
        loss.backward()
        assert torch.isfinite(sums).all(), f"length {length}, {num_anchors} anchors"
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters())
