"""The chunked losses against autograd in float64, and supervision that stops at the first gap."""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.loss import dpace_weights, head_loss, predicting_tokens, supervise

NUM_ROWS, NUM_TOKENS, WIDTH, VOCAB = 45, 20, 24, 61
KINDS = ("cross_entropy", "kl", "total_variation", "lk")


def inputs(
    kind: str = "cross_entropy", dtype: torch.dtype = torch.float32, scale: float = 0.3
) -> dict[str, Tensor | None]:
    """Return the op's tensors; a third of the rows are not used."""
    generator = torch.Generator().manual_seed(0)
    needs_target = kind != "cross_entropy"
    target = (torch.randn(NUM_TOKENS, WIDTH, generator=generator) * scale).to(dtype)
    return {
        "hidden": (torch.randn(NUM_ROWS, WIDTH, generator=generator) * scale).to(dtype),
        "head": torch.randn(VOCAB, WIDTH, generator=generator).to(dtype),
        "labels": torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator),
        "is_used": torch.rand(NUM_ROWS, generator=generator) > 0.33,
        "target_hidden": target if needs_target else None,
        "target_tokens": (
            torch.randint(0, NUM_TOKENS, (NUM_ROWS,), generator=generator) if needs_target else None
        ),
    }


def reference_losses(
    given: dict[str, Tensor | None], kind: str, hidden: Tensor, softcap: float = 0.0
) -> Tensor:
    """Return each row's loss in float64, differentiable; zero where a row is not used."""
    head = given["head"].double()
    log_q = (hidden @ head.T).log_softmax(-1)
    if kind == "cross_entropy":
        losses = -log_q.gather(1, given["labels"][:, None])[:, 0]
    else:
        target = given["target_hidden"].double()[given["target_tokens"]]
        logits = target @ head.T
        logits = softcap * (logits / softcap).tanh() if softcap else logits
        p, q = logits.softmax(-1), log_q.exp()
        divergence = torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
        distance = 0.5 * (p - q).abs().sum(-1)
        share = torch.exp(-3.0 * torch.minimum(p, q).sum(-1)).detach()
        share = {"kl": torch.ones(()), "total_variation": torch.zeros(()), "lk": share}[kind]
        losses = share * divergence + (1 - share) * distance
    return torch.where(given["is_used"], losses, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_rows", [1, 7, 15, 45, 1000])
def test_loss_and_gradient_equal_autograd_in_float64(kind: str, chunk_rows: int) -> None:
    given, weights = inputs(kind), torch.rand(NUM_ROWS)
    given["hidden"].requires_grad_()
    losses, is_correct, _ = head_loss(
        **given,
        kind=kind,
        chunk_rows=chunk_rows,
        head_rows=1 << 20,
        float8_head=[],
        target_softcap=0.0,
    )
    (losses * weights).sum().backward()
    hidden = given["hidden"].detach().double().requires_grad_()
    expected = reference_losses(given, kind, hidden)
    (expected * weights.double()).sum().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given["hidden"].grad.double(), hidden.grad, rtol=1e-4, atol=1e-6)
    best = (given["hidden"] @ given["head"].T).argmax(-1)
    assert torch.equal(is_correct, (best == given["labels"]) & given["is_used"])


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("head_rows", [40, 1 << 20])
def test_a_cap_bends_the_targets_distribution_and_not_the_drafters(
    kind: str, head_rows: int
) -> None:
    given = inputs(kind)
    assert given["is_used"].sum() < 40 < NUM_ROWS
    given["hidden"].requires_grad_()
    losses, is_correct, _ = head_loss(
        **given, kind=kind, chunk_rows=16, head_rows=head_rows, float8_head=[], target_softcap=1.5
    )
    losses.sum().backward()
    hidden = given["hidden"].detach().double().requires_grad_()
    expected = reference_losses(given, kind, hidden, softcap=1.5)
    expected.sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given["hidden"].grad.double(), hidden.grad, rtol=1e-4, atol=1e-6)
    uncapped = reference_losses(given, kind, hidden)
    assert (expected - uncapped).abs().max() > 0.01
    best = (given["hidden"] @ given["head"].T).argmax(-1)
    assert torch.equal(is_correct, (best == given["labels"]) & given["is_used"])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_rows_keep_a_float32_loss(kind: str) -> None:
    given = inputs(kind, torch.bfloat16)
    losses, _, gradient = head_loss(
        **given, kind=kind, chunk_rows=16, head_rows=1 << 20, float8_head=[], target_softcap=0.0
    )
    hidden = given["hidden"].double().requires_grad_()
    expected = reference_losses(given, kind, hidden)
    expected.sum().backward()
    assert losses.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), expected, rtol=0.02, atol=0.02)
    error = (gradient.double() - hidden.grad).norm() / hidden.grad.norm()
    assert error < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_used_count_nothing_even_where_they_are_nan(kind: str) -> None:
    given = inputs(kind)
    given["hidden"][~given["is_used"]] = float("nan")
    losses, is_correct, gradient = head_loss(
        **given, kind=kind, chunk_rows=8, head_rows=1 << 20, float8_head=[], target_softcap=0.0
    )
    assert torch.equal(gradient.abs().amax(-1) > 0, given["is_used"])
    assert torch.equal(losses > 0, given["is_used"])
    assert not is_correct[~given["is_used"]].any()


@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits_stay_finite(kind: str) -> None:
    losses, _, gradient = head_loss(
        **inputs(kind, scale=1e4),
        kind=kind,
        chunk_rows=8,
        head_rows=1 << 20,
        float8_head=[],
        target_softcap=0.0,
    )
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_drafter_that_agrees_with_the_target_has_no_loss_and_no_gradient(kind: str) -> None:
    given = inputs(kind)
    given["hidden"] = given["target_hidden"][given["target_tokens"]]
    losses, _, gradient = head_loss(
        **given, kind=kind, chunk_rows=8, head_rows=1 << 20, float8_head=[], target_softcap=0.0
    )
    torch.testing.assert_close(losses, torch.zeros(NUM_ROWS), atol=1e-5, rtol=0)
    assert gradient.abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_left_alone(kind: str) -> None:
    given = inputs(kind)
    copies = {name: value.clone() for name, value in given.items() if value is not None}
    head_loss(
        **given, kind=kind, chunk_rows=8, head_rows=1 << 20, float8_head=[], target_softcap=0.0
    )
    assert all(torch.equal(given[name], value) for name, value in copies.items())


@pytest.mark.parametrize("kind", KINDS)
def test_op_holds_what_the_compiler_needs_of_it(kind: str) -> None:
    given = inputs(kind)
    given["hidden"].requires_grad_()
    torch.library.opcheck(head_loss, (*given.values(), kind, 16, 1 << 20, [], 1.5))


def test_a_loss_against_the_target_without_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="'kl' got no hidden states of the target"):
        head_loss(
            **inputs(),
            kind="kl",
            chunk_rows=8,
            head_rows=1 << 20,
            float8_head=[],
            target_softcap=0.0,
        )


def test_the_target_predicts_slot_k_at_anchor_plus_k_minus_1() -> None:
    got = predicting_tokens(torch.tensor([3, 18]), num_slots=3, num_tokens=20)
    assert got.tolist() == [3, 4, 5, 18, 19, 19]


def dpace_of(confidence: float, num_supervised: int, num_slots: int = 15) -> Tensor:
    losses = torch.full((1, num_slots), -torch.tensor(confidence).log().item())
    return dpace_weights(losses, torch.arange(num_slots)[None] < num_supervised)[0]


def test_dpace_weighs_a_slot_by_what_is_reached_from_it() -> None:
    # At confidence 0.8 a slot counts 0.9: w_1 = 0.9 + 0.9^2 + ... + 0.9^15.
    weights = dpace_of(0.8, 15)
    expected = [sum(0.9**m for m in range(k, 16)) for k in range(1, 16)]
    torch.testing.assert_close(weights, torch.tensor(expected))
    torch.testing.assert_close(dpace_of(0.05, 15)[:4], torch.tensor([1.105, 0.580, 0.305, 0.160]),
                               atol=1e-3, rtol=0)  # fmt: skip


def test_dpace_ends_with_the_supervision_of_its_block() -> None:
    weights = dpace_of(0.8, 2)
    torch.testing.assert_close(weights[:2], torch.tensor([0.9 + 0.81, 0.81]))
    assert not weights[2:].any()
    assert not dpace_of(0.8, 0).any()


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
