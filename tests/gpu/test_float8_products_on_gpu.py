"""Float8 products on the GPU against the CPU's form of them, and a captured step made of them."""

import pytest
import torch

from common.drafters.dflash.float8_products import float8_products, scaled
from common.drafters.dflash.float8_slopes import float8_slopes
from common.drafters.dflash.loss import head_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
# Two of 4 significant bits each: 3.6 % root mean square.
TOLERANCE = 0.05
# A value between two float8 numbers may go to either where the last bit of a scale differs.
TIES = 0.003


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (513, 272), (300, 4096)])
@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)])
def test_kernels_make_what_the_cpu_makes(
    dtype: torch.dtype, shape: tuple[int, int], ways: tuple[bool, bool]
) -> None:
    x = (torch.randn(shape) * torch.rand(shape[0], 1) * 100).to(dtype)
    x[:, 3] = 0
    by_rows, by_columns = ways
    wanted = scaled(x, by_rows=by_rows, by_columns=by_columns)
    got = scaled(x.cuda(), by_rows=by_rows, by_columns=by_columns)
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        if one.dtype == torch.float32:
            torch.testing.assert_close(one.cpu(), other)
        elif one.numel():
            assert (one.cpu().float() != other.float()).float().mean() < TIES


@pytest.mark.parametrize("sizes", [[16, 48, 16], [512, 1024], [128, 129]])
def test_parts_one_below_the_other_are_the_whole_matrix(sizes: list[int]) -> None:
    x = torch.randn(sum(sizes), 272, device="cuda", dtype=torch.bfloat16)
    for one, other in zip(scaled(*x.split(sizes)), scaled(x), strict=True):
        assert torch.equal(one, other)


def test_rows_of_a_wider_matrix_and_nan_are_kept() -> None:
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16)
    x[5, 40] = float("nan")
    part = x[:, 32:80]
    rows, scales, columns, _ = scaled(part)
    assert rows.float()[5].isnan().any()
    assert columns.float()[8].isnan().any()
    assert relative_error(rows.float()[:5] * scales[:5], part[:5]) < TOLERANCE


@pytest.mark.parametrize("num_rows", [37, 512])
def test_products_and_gradients_are_those_of_bfloat16(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [
        torch.randn(size, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in (128, 64)
    ]
    slopes = [torch.randn(num_rows, len(weight), device="cuda").bfloat16() for weight in weights]
    got = float8_products(x, weights)
    got_slopes = torch.autograd.grad(got, [x, *weights], slopes)
    wanted = [x @ weight.T for weight in weights]
    wanted_slopes = torch.autograd.grad(wanted, [x, *weights], slopes)
    for one, other in zip([*got, *got_slopes], [*wanted, *wanted_slopes], strict=True):
        assert 0 < relative_error(one, other) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [96, 5008])
def test_slopes_are_those_of_the_cpu(dtype: torch.dtype, vocab: int) -> None:
    logits = (torch.randn(40, vocab) * 3).to(dtype)
    labels, is_used = torch.randint(vocab, (40,)), torch.arange(40) % 5 != 0
    labels[1] = 0
    logits[2, labels[2]] = 60
    found = []
    for device in ("cpu", "cuda"):
        losses = torch.empty(40, device=device)
        is_correct = torch.empty(40, dtype=torch.bool, device=device)
        given = (part.to(device) for part in (logits, labels, is_used))
        found.append((*float8_slopes(*given, losses, is_correct), losses, is_correct))
    (others, *wanted), (got_others, *got) = found
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    assert (got_others.cpu().float() != others.float()).float().mean() < TIES


def test_cross_entropy_through_a_float8_head_is_that_in_bfloat16() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16) * 0.2
    labels = torch.randint(4096, (300,), device="cuda")
    is_used = torch.arange(300, device="cuda") % 7 != 0
    rest = (labels, is_used, None, None, "cross_entropy", 128, 300)
    losses, is_correct, gradient = head_loss(hidden, head, *rest, [], 0.0)
    got, got_correct, got_gradient = head_loss(hidden, head, *rest, list(scaled(head)), 0.0)
    assert 0 < relative_error(got, losses) < TOLERANCE
    assert (got_correct == is_correct).float().mean() > 0.95
    assert 0 < relative_error(got_gradient, gradient) < 2 * TOLERANCE
    assert not got_gradient[~is_used].any()
    assert not got[~is_used].any()
