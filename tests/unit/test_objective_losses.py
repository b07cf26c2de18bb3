"""Each loss of the config over whole rows: against a plain float64 form, in packed rows, never NaN."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.anchors import select_anchors
from common.drafters.dflash.config import LossName
from common.drafters.dflash.metrics import unpack_sums
from common.drafters.dflash.model import DFlashDrafter
from common.drafters.dflash.objective import DFlashObjective, StagedRow, head_bucket
from tests.drafters import make_drafter, make_row, make_spec, make_tables

LOSSES = get_args(LossName)
MAX_DOCUMENTS = 8


def make_objective(
    drafter: DFlashDrafter, loss: LossName, num_anchors: int = 12, chunk_rows: int = 16
) -> DFlashObjective:
    embedding, head = make_tables(drafter.spec)
    return DFlashObjective(
        drafter, embedding=embedding, head=head * 0.2, num_anchors=num_anchors,
        max_documents=MAX_DOCUMENTS, loss_chunk_rows=chunk_rows, backend="dense", loss=loss,
    )  # fmt: skip


def draft_states(objective: DFlashObjective, row: StagedRow) -> Tensor:
    """Return the network's final hidden states [A, S-1, H]: what a forward hands to the head."""
    kept = []
    hook = objective.drafter.register_forward_hook(lambda _m, _i, output: kept.append(output))
    objective(row)
    hook.remove()
    return kept[0].view(objective.num_anchors, objective.drafter.spec.num_draft_tokens, -1)


def slot_loss(loss: LossName, z: Tensor, y: Tensor, label: int) -> Tensor:
    """Return the loss of one slot from draft logits z and the target's y, float64."""
    p, q = y.softmax(-1), z.softmax(-1)
    if loss in ("cross_entropy", "dpace"):
        return -q[label].log()
    divergence, distance = (p * (p / q).log()).sum(), 0.5 * (p - q).abs().sum()
    if loss == "lk":
        share = torch.exp(-3.0 * torch.minimum(p, q).sum()).detach()
        return share * divergence + (1 - share) * distance
    return divergence if loss == "kl" else distance


def reference(objective: DFlashObjective, row: StagedRow, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss sum and the sum of weights, slot by slot, from final hidden states [A, S-1, H]."""
    head, spec = objective.head.double(), objective.drafter.spec
    anchors, is_valid = select_anchors(
        row.loss_mask, row.document_ids, row.draw, objective.num_anchors, MAX_DOCUMENTS
    )
    total, weight_sum = torch.zeros((), dtype=torch.float64), torch.zeros(())
    for block, anchor in enumerate(anchors.tolist()):
        parts, decay = [], spec.decay()
        for k in range(1, spec.block_size):
            where = anchor + k
            if (
                not is_valid[block]
                or where >= len(row.token_ids)
                or row.document_ids[where] != row.document_ids[anchor]
                or not row.loss_mask[where]
            ):
                break
            y = row.last_hidden_states_normed[where - 1].double() @ head.T
            z = states[block, k - 1] @ head.T
            parts.append(slot_loss(objective.loss, z, y, int(row.token_ids[where])))
        if objective.loss == "dpace":
            confidence = [0.5 * (-part.detach()).exp() + 0.5 for part in parts]
            reached = [torch.stack(confidence[: m + 1]).prod() for m in range(len(parts))]
            decay = [torch.stack(reached[k:]).sum() for k in range(len(parts))]
        for weight, part in zip(decay, parts, strict=False):
            total, weight_sum = total + weight * part, weight_sum + weight
    return total, weight_sum


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk_rows", [5, 1000])
def test_loss_weights_and_gradient_are_those_of_the_plain_form(
    loss: LossName, chunk_rows: int
) -> None:
    spec = make_spec(block_size=5)
    objective = make_objective(make_drafter(spec), loss, num_anchors=30, chunk_rows=chunk_rows)
    row = make_row(spec, (13, 1, 11), num_tokens=28)
    row.loss_mask[7] = 0  # supervision stops there
    states = draft_states(objective, row)
    states.retain_grad()
    kept = states.detach().double().requires_grad_()
    expected, weight_sum = reference(objective, row, kept)
    expected.backward()
    objective.drafter.forward = lambda *_: states.flatten(0, 1)  # the network's own output again
    total, sums = objective(row)
    total.backward()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums[1], weight_sum.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad.double(), kept.grad, rtol=1e-4, atol=1e-6)
    assert kept.grad.any()
    assert sums[0] == total.detach()


def test_a_cap_of_the_targets_logits_reaches_the_loss() -> None:
    """A cap far above the logits leaves the loss as it is; a low one makes the target uniform."""
    spec = make_spec()
    objective = make_objective(make_drafter(spec), "kl")
    row = make_row(spec, (20,), num_tokens=20)
    plain = objective(row)[0]
    objective.target_softcap = 1e6
    torch.testing.assert_close(objective(row)[0], plain, rtol=1e-3, atol=1e-3)
    objective.target_softcap = 1e-6
    capped = objective(row)[0]
    row = row._replace(last_hidden_states_normed=torch.zeros_like(row.last_hidden_states_normed))
    objective.target_softcap = 0.0
    torch.testing.assert_close(objective(row)[0], capped, rtol=1e-4, atol=1e-4)
    assert abs(capped - plain) > 1


@pytest.mark.parametrize("loss", LOSSES)
def test_documents_of_a_row_have_the_loss_that_they_have_alone(loss: LossName) -> None:
    spec = make_spec()
    objective = make_objective(make_drafter(spec), loss, num_anchors=64)
    packed = make_row(spec, (15, 11), num_tokens=26)
    _, sums = objective(packed)
    parts = []
    for start, stop in ((0, 15), (15, 26)):
        alone = StagedRow(
            *(value[start:stop] for value in packed[:5]), packed.draw,
            packed.last_hidden_states_normed[start:stop],
        )  # fmt: skip
        alone = alone._replace(document_ids=torch.zeros(stop - start, dtype=torch.int32))
        parts.append(objective(alone)[1])
    torch.testing.assert_close(sums, parts[0] + parts[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lengths", [(), (3,), (23, 14)])
def test_invalid_blocks_and_rows_without_supervision_never_give_nan(
    loss: LossName, lengths: tuple[int, ...]
) -> None:
    spec = make_spec()
    drafter = make_drafter(spec)
    row = make_row(spec, lengths, num_tokens=40)
    if len(lengths) == 1:
        row.loss_mask.zero_()
    total, sums = make_objective(drafter, loss, num_anchors=40)(row)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(sums).all()
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters())
    if len(lengths) < 2:
        assert total == 0
        assert not sums.any()
        assert not any(p.grad.any() for p in drafter.parameters())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_falls_when_it_is_trained_on(loss: LossName) -> None:
    spec = make_spec()
    drafter = make_drafter(spec)
    objective, row = make_objective(drafter, loss), make_row(spec, (23, 14), num_tokens=40)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-3)
    means = []
    for _ in range(30):
        total, sums = objective(row)
        optimizer.zero_grad()
        (total / sums[1]).backward()
        optimizer.step()
        means.append((total / sums[1]).item())
    assert means[-1] < 0.8 * means[0]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_bucket_that_all_rows_fit_in_changes_nothing(loss: LossName) -> None:
    spec = make_spec(block_size=8)
    row = make_row(spec, (18, 11), num_tokens=300)
    results = []
    for head_rows in (0, 128):
        drafter = make_drafter(spec)
        objective = make_objective(drafter, loss, num_anchors=40)
        objective.head_rows = head_bucket(head_rows, 40 * 7)
        total, sums = objective(row)
        total.backward()
        results.append([total.detach(), sums, *(p.grad for p in drafter.parameters())])
    whole, bucket = results
    assert 0 < whole[1][-7:].sum() <= 128
    for one, other in zip(whole, bucket, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_whole_blocks_that_find_no_room_are_dropped_from_the_end_and_counted() -> None:
    spec = make_spec(block_size=8)
    row = make_row(spec, (190,), num_tokens=300)
    objective = make_objective(make_drafter(spec), "cross_entropy", num_anchors=64)
    everything = unpack_sums(objective(row)[1].tolist())
    objective.head_rows = head_bucket(100, 64 * 7)
    sums = objective(row)[1]
    figures = unpack_sums(sums.tolist())
    assert objective.head_rows == 128
    assert figures.num_blocks == 128 // 7
    assert figures.num_blocks + figures.num_dropped_blocks == everything.num_blocks == 64
    assert everything.num_dropped_blocks == 0
    assert sums[-7:].tolist() == [figures.num_blocks] * 7
