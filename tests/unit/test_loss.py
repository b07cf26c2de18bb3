"""The chunked loss against autograd in float64, and supervision that stops at the first gap."""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.loss import supervise, weighted_cross_entropy

NUM_ROWS, WIDTH, VOCAB = 45, 24, 61


def inputs(
    seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden rows, head, labels and weights, a third of which are zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)
    head = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)
    weights = torch.rand(NUM_ROWS, generator=generator)
    weights[torch.rand(NUM_ROWS, generator=generator) < 0.33] = 0
    return hidden, head, labels, weights


def reference(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, argmax == label and gradient by autograd in float64."""
    rows = hidden.double().requires_grad_()
    logits = rows @ head.double().T
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    loss = (losses * weights.double()).sum()
    loss.backward()
    return loss.detach(), logits.argmax(-1) == labels, rows.grad


@pytest.mark.parametrize("chunk_rows", [1, 7, 15, 45, 1000])
def test_loss_and_gradient_equal_autograd_in_float64(chunk_rows: int) -> None:
    hidden, head, labels, weights = inputs()
    hidden.requires_grad_()
    loss, is_correct, _ = weighted_cross_entropy(hidden, head, labels, weights, chunk_rows)
    (3.0 * loss).backward()
    expected_loss, expected_correct, expected_gradient = reference(
        hidden.detach(), head, labels, weights
    )
    torch.testing.assert_close(loss.detach().double(), expected_loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(is_correct, expected_correct)
    torch.testing.assert_close(hidden.grad.double(), 3.0 * expected_gradient, rtol=1e-5, atol=1e-5)


def test_bfloat16_rows_keep_a_float32_loss() -> None:
    hidden, head, labels, weights = inputs(dtype=torch.bfloat16)
    loss, _, gradient = weighted_cross_entropy(hidden, head, labels, weights, 16)
    expected_loss, _, expected_gradient = reference(hidden, head, labels, weights)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), expected_loss, rtol=0.02, atol=0.02)
    error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
    assert error < 0.02


def test_rows_without_weight_have_no_gradient() -> None:
    hidden, head, labels, weights = inputs()
    _, _, gradient = weighted_cross_entropy(hidden, head, labels, weights, 8)
    has_gradient = gradient.abs().amax(-1) > 0
    assert torch.equal(has_gradient, weights > 0)


def test_zero_weights_give_zero_loss_and_zero_gradient() -> None:
    hidden, head, labels, weights = inputs()
    loss, _, gradient = weighted_cross_entropy(hidden, head, labels, torch.zeros_like(weights), 8)
    assert loss == 0
    assert not gradient.any()


def test_huge_logits_stay_finite() -> None:
    hidden, head, labels, weights = inputs()
    loss, _, gradient = weighted_cross_entropy(hidden * 1e4, head, labels, weights, 8)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_arguments_are_left_alone() -> None:
    values = inputs()
    copies = [value.clone() for value in values]
    weighted_cross_entropy(*values, 8)
    assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True))


def test_op_holds_what_the_compiler_needs_of_it() -> None:
    hidden, head, labels, weights = inputs()
    torch.library.opcheck(
        weighted_cross_entropy, (hidden.requires_grad_(), head, labels, weights, 16)
    )


# Supervision: two documents (0..9, 10..15), padding from 16. Token t is 100 + t.
TOKENS = torch.arange(100, 120, dtype=torch.int32)
DOCUMENTS = torch.tensor([0] * 10 + [1] * 6 + [-1] * 4, dtype=torch.int32)
DECAY = torch.tensor([1.0, 0.5, 0.25])


def weights_at(
    anchor: int, unsupervised: tuple[int, ...] = (), is_valid: bool = True
) -> list[float]:
    mask = (DOCUMENTS >= 0).to(torch.uint8)
    mask[list(unsupervised)] = 0
    got = supervise(
        TOKENS, DOCUMENTS, mask, torch.tensor([anchor]), torch.tensor([is_valid]), DECAY
    )
    assert torch.equal(got.is_supervised, got.weights > 0)
    return got.weights[0].tolist()


def test_label_of_slot_k_is_the_token_at_anchor_plus_k() -> None:
    mask = torch.ones(20, dtype=torch.uint8)
    anchors = torch.tensor([0, 4, 10])
    got = supervise(TOKENS, DOCUMENTS, mask, anchors, torch.tensor([True] * 3), DECAY)
    assert got.labels.tolist() == [[101, 102, 103], [105, 106, 107], [111, 112, 113]]


def test_all_slots_of_a_supervised_block_weigh_their_decay() -> None:
    assert weights_at(2) == [1.0, 0.5, 0.25]


def test_supervision_stops_at_the_first_gap() -> None:
    assert weights_at(2, unsupervised=(4,)) == [1.0, 0.0, 0.0]
    assert weights_at(2, unsupervised=(3,)) == [0.0, 0.0, 0.0]


def test_supervision_stops_at_the_end_of_the_document() -> None:
    assert weights_at(8) == [1.0, 0.0, 0.0]
    assert weights_at(9) == [0.0, 0.0, 0.0]
    assert weights_at(13) == [1.0, 0.5, 0.0]


def test_supervision_stops_at_the_end_of_the_row() -> None:
    documents, mask = torch.zeros(20, dtype=torch.int32), torch.ones(20, dtype=torch.uint8)
    anchors = torch.tensor([17, 19])
    got = supervise(TOKENS, documents, mask, anchors, torch.tensor([True, True]), DECAY)
    assert got.is_supervised.tolist() == [[True, True, False], [False, False, False]]


def test_invalid_block_weighs_nothing() -> None:
    assert weights_at(2, is_valid=False) == [0.0, 0.0, 0.0]
