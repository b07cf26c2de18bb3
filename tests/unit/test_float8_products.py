"""Float8 products against float64: rounding is all that they lose, forward and backward."""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.float8_products import (
    LARGEST,
    Scaled,
    float8_products,
    joined_products,
    padded,
    scaled,
)
from common.drafters.dflash.float8_slopes import float8_slopes, head_gradient
from common.drafters.dflash.loss import head_loss
from common.drafters.dflash.row_losses import cross_entropy

# Each factor has 4 significant bits: a product's root mean square error is near 3.6 %.
TOLERANCE = 0.05


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def values_of(matrix: Scaled, num_rows: int) -> tuple[Tensor, Tensor]:
    rows = matrix.rows.double() * matrix.row_scales
    columns = matrix.columns.double() * matrix.column_scales
    return rows, columns.T[:num_rows]


@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_both_forms_hold_the_matrix_and_its_largest_values_exactly(num_rows: int) -> None:
    x = torch.randn(num_rows, 48) * torch.rand(num_rows, 1) * 100
    x[:, 5] = 0
    matrix = scaled(x)
    for form, dim in zip(values_of(matrix, num_rows), (1, 0), strict=True):
        assert relative_error(form, x.double()) < TOLERANCE
        torch.testing.assert_close(form.abs().amax(dim).float(), x.abs().amax(dim))
    assert matrix.columns.shape == (48, padded(num_rows))
    assert not matrix.columns.float()[:, num_rows:].any()
    assert matrix.rows.float().abs().max() == LARGEST


def test_what_nobody_asks_for_is_empty() -> None:
    x = torch.randn(20, 32)
    assert [len(part) for part in scaled(x, by_rows=False)] == [0, 0, 32, 32]
    assert [len(part) for part in scaled(x, by_columns=False)] == [20, 20, 0, 0]


def test_parts_one_below_the_other_are_the_whole_matrix() -> None:
    x = torch.randn(80, 32)
    for one, other in zip(scaled(*x.split([16, 48, 16])), scaled(x), strict=True):
        assert torch.equal(one, other)


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    x = torch.randn(20, 32)
    x[3, 4] = float("nan")
    matrix = scaled(x)
    assert matrix.rows.float()[3].isnan().any()
    assert matrix.columns.float()[4].isnan().any()


@pytest.mark.parametrize("num_rows", [37, 64])
@pytest.mark.parametrize("sizes", [(32,), (32, 48, 16)])
def test_products_and_gradients_are_those_of_float64(num_rows: int, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 64, generator=generator, requires_grad=True)
    weights = [torch.randn(size, 64, generator=generator, requires_grad=True) for size in sizes]
    slopes = [torch.randn(num_rows, size, generator=generator) for size in sizes]
    got = float8_products(x, weights)
    torch.autograd.backward(got, slopes)
    wide_x = x.detach().double().requires_grad_()
    wide = [weight.detach().double().requires_grad_() for weight in weights]
    wanted = [wide_x @ weight.T for weight in wide]
    torch.autograd.backward(wanted, [slope.double() for slope in slopes])
    for one, other in zip(got, wanted, strict=True):
        assert 0 < relative_error(one, other) < TOLERANCE
    assert relative_error(x.grad, wide_x.grad) < TOLERANCE
    for one, other in zip(weights, wide, strict=True):
        assert relative_error(one.grad, other.grad) < TOLERANCE


def test_rows_that_are_not_trained_cost_no_gradient() -> None:
    x, weight = torch.randn(20, 32), torch.randn(16, 32, requires_grad=True)
    (y,) = float8_products(x, [weight])
    y.sum().backward()
    assert relative_error(weight.grad, x.double().sum(0).expand(16, 32)) < TOLERANCE
    _, _, _, weight_columns, _ = joined_products(x, [weight], False)
    assert not len(weight_columns)


@pytest.mark.parametrize("needs_d_x", [True, False])
def test_op_has_the_shapes_that_it_promises(needs_d_x: bool) -> None:
    x = torch.randn(20, 32, requires_grad=needs_d_x)
    weights = [torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)]
    torch.library.opcheck(
        joined_products, (x, weights, needs_d_x),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["cross_entropy", "kl"])
def test_loss_through_a_float8_head_is_that_of_the_exact_one(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, target = (torch.randn(40, 32, generator=generator) for _ in range(2))
    head = torch.randn(64, 32, generator=generator) * 0.3
    labels = torch.randint(64, (40,), generator=generator)
    is_used = torch.arange(40) % 5 != 0
    rest = (target, torch.arange(40)) if kind == "kl" else (None, None)
    results = [
        head_loss(hidden, head, labels, is_used, *rest, kind, 16, 40, form, 0.0)
        for form in ([], list(scaled(head)))
    ]
    (losses, _, gradient), (losses_8, _, gradient_8) = results
    assert 0 < relative_error(losses_8, losses.double()) < TOLERANCE
    assert 0 < relative_error(gradient_8, gradient.double()) < 2 * TOLERANCE
    assert not gradient_8[~is_used].any()


def test_slopes_beside_a_likely_label_keep_their_size() -> None:
    generator = torch.Generator().manual_seed(4)
    head = torch.randn(64, 32, generator=generator)
    labels = torch.randint(64, (40,), generator=generator)
    logits = (head[labels] * torch.linspace(0.15, 0.5, 40)[:, None]) @ head.T
    is_used = torch.arange(40) % 5 != 0
    losses, is_correct = torch.empty(40), torch.empty(40, dtype=torch.bool)
    slopes = float8_slopes(logits, labels, is_used, losses, is_correct)
    got = head_gradient(slopes, labels, head, scaled(head))
    wanted_losses, wanted_slopes = cross_entropy(logits, labels)
    assert losses[is_used].min() < 0.01 < 1 < losses.max()
    assert torch.equal(losses, wanted_losses * is_used)
    assert torch.equal(is_correct, (logits.argmax(-1) == labels) & is_used)
    for row in is_used.nonzero()[:, 0]:
        assert 0 < relative_error(got[row], wanted_slopes[row].double() @ head.double()) < TOLERANCE
    assert not got[~is_used].any()
