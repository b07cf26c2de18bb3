"""Rows in float8: the error is bounded value by value, zeros stay zeros, nothing is left over."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import common
from common import float8
from common.errors import ConfigError, LayoutMismatchError
from common.float8 import E4M3_MAX, LEAST_SCALE, dequantise, quantise

# A float32 product more or less.
SLACK = 1 + 2.0**-20
NAN_CODE = 0x7F

finite = st.floats(-(2.0**126), 2.0**126, width=32)
rows = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(finite, min_size=width, max_size=width), min_size=1, max_size=5)
)


def buffers(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Return values and scales as an older row might have left them."""
    values = torch.full((tokens, width), NAN_CODE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return values, torch.full((tokens,), math.nan)


def quantised(x: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    values, scales = buffers(tokens or len(x), x.shape[1])
    quantise(x, values, scales)
    return values, scales


def there_and_back(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    values, scales = quantised(x)
    out = torch.full(x.shape, math.nan, dtype=dtype)
    dequantise(values, scales, out)
    return out


def codes(values: Tensor) -> list[list[int]]:
    return values.view(torch.uint8).tolist()


@settings(deadline=None)
@given(rows)
def test_no_value_is_off_by_more_than_half_a_step_of_e4m3(numbers: list[list[float]]) -> None:
    x = torch.tensor(numbers)
    _, scales = quantised(x)
    assert (scales >= LEAST_SCALE).all()
    assert torch.isfinite(scales).all()
    # Half a step: 2^-4 of a normal number, 2^-10 of the scale for a subnormal one.
    bound = torch.maximum(x.abs() * 2.0**-4, scales[:, None] * 2.0**-10)
    assert ((there_and_back(x) - x).abs() <= bound * SLACK).all()


@settings(deadline=None)
@given(rows)
def test_a_tokens_largest_value_and_its_zeros_keep_their_values(numbers: list[list[float]]) -> None:
    x, got = torch.tensor(numbers), there_and_back(torch.tensor(numbers))
    assert (got[x == 0] == 0).all()
    largest = x.abs() == x.abs().amax(-1, keepdim=True)
    above_the_floor = x.abs() >= E4M3_MAX * LEAST_SCALE
    torch.testing.assert_close(
        got[largest & above_the_floor], x[largest & above_the_floor], rtol=1e-6, atol=0
    )


@settings(deadline=None)
@given(rows, st.randoms())
def test_channels_and_tokens_are_each_on_their_own(numbers: list[list[float]], chooser) -> None:
    x = torch.tensor(numbers)
    values, scales = quantised(x)
    channels = chooser.sample(range(x.shape[1]), x.shape[1])
    tokens = chooser.sample(range(len(x)), len(x))
    moved, moved_scales = quantised(x[tokens][:, channels].contiguous())
    assert codes(moved) == codes(values.view(torch.uint8)[tokens][:, channels].contiguous())
    assert torch.equal(moved_scales, scales[tokens])


@settings(deadline=None)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8), st.integers(-60, 60))
def test_a_power_of_two_goes_into_the_scale_alone(numbers: list[float], exponent: int) -> None:
    # Numbers that stay far above the least scale.
    x = torch.tensor([[1.0, *(n for n in numbers if abs(n) > 1e-3)]])
    values, scales = quantised(x)
    scaled_values, scaled_scales = quantised(x * 2.0**exponent)
    assert codes(scaled_values) == codes(values)
    assert torch.equal(scaled_scales, scales * 2.0**exponent)


def test_ties_round_to_even_and_signs_of_zero_stay() -> None:
    # 448 as the largest gives a scale of 1; steps are 2 from 16 to 32, and 2^-9 near zero.
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 21.0, 2.0**-10, 3 * 2.0**-10, -0.0, -(2.0**-12)]])
    expected = [[448.0, 16.0, 20.0, -16.0, 20.0, 0.0, 4 * 2.0**-10, -0.0, -0.0]]
    got = there_and_back(x)
    assert got.tolist() == expected
    assert torch.equal(torch.signbit(got), torch.signbit(x))


def test_tokens_behind_the_features_are_zeros_with_a_scale_that_is_no_zero() -> None:
    x = torch.randn(70, 8)
    values, scales = quantised(x, tokens=100)
    assert (values.view(torch.uint8)[70:] == 0).all()
    assert (scales[70:] == LEAST_SCALE).all()
    full, full_scales = quantised(torch.cat([x, torch.zeros(30, 8)]))
    assert codes(full) == codes(values)
    assert torch.equal(full_scales, scales)
    out = torch.full((100, 8), math.nan, dtype=torch.bfloat16)
    dequantise(values, scales, out)
    assert (out[70:] == 0).all()


def test_a_row_without_a_token_is_all_zeros() -> None:
    values, scales = quantised(torch.zeros(0, 8), tokens=3)
    assert codes(values) == [[0] * 8] * 3
    assert (scales == LEAST_SCALE).all()


def test_a_massive_activation_costs_the_small_channels_of_its_token_alone() -> None:
    x = torch.ones(2, 4) * 1.9
    x[0, 0] = 30000.0
    got = there_and_back(x)
    step = 30000 / 448 * 2.0**-9
    assert abs(got[0, 1] - 1.9) <= step / 2 * SLACK
    assert got[0, 1] != x[0, 1]
    assert got[0, 0] == x[0, 0]
    torch.testing.assert_close(got[1], x[1])


def test_bfloat16_in_and_out_is_the_float32_path_rounded_once() -> None:
    x = torch.randn(130, 24).to(torch.bfloat16)
    values, scales = quantised(x)
    wide_values, wide_scales = quantised(x.float())
    assert codes(values) == codes(wide_values)
    assert torch.equal(scales, wide_scales)
    assert torch.equal(there_and_back(x, torch.bfloat16), there_and_back(x).to(torch.bfloat16))


def test_float32_features_at_the_top_of_their_range_stay_finite() -> None:
    x = torch.tensor([[3.3e38, -3.3e38, 1.0], [1e-38, -1e-44, 0.0]])
    got = there_and_back(x)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[0], torch.tensor([3.3e38, -3.3e38, 0.0]))
    assert (got[1] == 0).all(), "below the least scale"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("values", {"values": torch.zeros(4, 8, dtype=torch.uint8)}),
        ("values", {"values": torch.zeros(4, 9).to(torch.float8_e4m3fn)}),
        ("values", {"values": torch.zeros(8, 4).to(torch.float8_e4m3fn).T}),
        ("scales", {"scales": torch.zeros(4, 1)}),
        ("scales", {"scales": torch.zeros(4, dtype=torch.bfloat16)}),
        ("features", {"features": torch.zeros(4, 8, dtype=torch.float64)}),
        ("features", {"features": torch.zeros(5, 8)}),
    ],
)  # fmt: skip
def test_tensors_that_are_no_row_are_refused_by_name(name: str, changed: dict) -> None:
    values, scales = buffers(4, 8)
    given_tensors = {"features": torch.zeros(4, 8), "values": values, "scales": scales, **changed}
    with pytest.raises(LayoutMismatchError, match=f"{name} got .*expected"):
        quantise(**given_tensors)


def test_a_buffer_of_another_length_is_refused() -> None:
    values, scales = quantised(torch.zeros(4, 8))
    for tokens in (3, 5):
        with pytest.raises(LayoutMismatchError, match=f"out got {tokens} tokens, expected 4"):
            dequantise(values, scales, torch.zeros(tokens, 8))


def test_a_gpu_without_triton_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "common.float8_kernels", raising=False)
    monkeypatch.delattr(common, "float8_kernels", raising=False)
    with pytest.raises(ConfigError, match=r"aux_dtype = 'fp8' on a GPU needs triton.*'bf16'"):
        float8._kernels()
    float8.check_device(torch.device("cpu"))
