"""The Triton kernels against the torch code on the CPU, bit for bit, and what they must not do."""

import math
import os
import secrets

import pytest
import torch
from torch import Tensor

from common import float8
from common.float8 import LEAST_SCALE, dequantise, quantise
from common.ring.cuda_segment import CudaSegment
from common.ring.layout import SlotLayout
from common.ring.segment import SEGMENT_PREFIX, HostSegment
from common.tensors import StagingBuffers
from services.target_server.capture import Float8Filler
from tests.rings import make_schema

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
# One value; no power of two; the demo's; a row of registers; wider than the registers; twice that.
WIDTHS = (1, 33, 2880, 20480, 40960, 65537)
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def on_a_gpu_with_float8() -> None:
    float8.check_device(torch.device("cuda"))


def make_features(tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return tokens of every kind: plain, massive, wide of range, tiny, huge, zeros, ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    x[1::8] *= torch.exp2(torch.randint(-24, 4, (1, width), generator=generator).float())
    x[2::8, width // 2] = -24832.0
    x[3::8] *= 2.0**-90
    x[4::8] *= 2.0**-120
    x[5::8] *= 2.0**120
    x[6::8] = 0.0
    # With 448 as the largest the scale is 1, and odd numbers above 16 are ties.
    x[7::8] = torch.randint(-60, 60, (1, width), generator=generator).float()
    x[7::8, 0] = 448.0
    x[0::8, 0] = -0.0
    return x.to(dtype)


def stale(tokens: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """Return values and scales full of NaN, as an older row might have left them."""
    values = torch.full((tokens, width), 0x7F, dtype=torch.uint8, device=device)
    return values.view(torch.float8_e4m3fn), torch.full((tokens,), math.nan, device=device)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    as_bytes = (got.cpu().view(torch.uint8), expected.view(torch.uint8))
    differing = (as_bytes[0] != as_bytes[1]).sum().item()
    assert differing == 0, f"{differing} of {as_bytes[0].numel()} bytes differ"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise_writes_the_bits_that_the_cpu_writes(width: int, dtype: torch.dtype) -> None:
    for tokens, used in ((24, 24), (24, 17), (24, 1), (24, 0)):
        x = make_features(24, width, dtype, seed=used)[:used]
        values, scales = stale(tokens, width, "cpu")
        quantise(x, values, scales)
        got_values, got_scales = stale(tokens, width, "cuda")
        quantise(x.cuda(), got_values, got_scales)
        assert_same_bits(got_values, values)
        assert_same_bits(got_scales, scales)
        assert (got_scales[used:] == LEAST_SCALE).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise_writes_the_bits_that_the_cpu_writes(width: int, dtype: torch.dtype) -> None:
    # Every code that is a number, at every place of a block.
    codes = torch.arange(24 * width).view(24, width) * 37 % 256
    codes[codes & 0x7F == 0x7F] = 0
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.exp2(torch.linspace(-90, 90, 24)) * 1.37
    out = torch.full((24, width), math.nan, dtype=dtype)
    dequantise(values, scales, out)
    got = torch.full((24, width), math.nan, dtype=dtype, device="cuda")
    dequantise(values.cuda(), scales.cuda(), got)
    assert_same_bits(got, out)


def test_both_are_captured_in_a_cuda_graph_so_neither_syncs_nor_allocates() -> None:
    x = make_features(64, 2880, torch.bfloat16).cuda()
    values, scales = stale(64, 2880, "cuda")
    out = torch.full_like(x, math.nan)
    quantise(x, values, scales)  # compiles
    dequantise(values, scales, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantise(x, values, scales)
        dequantise(values, scales, out)
    fresh = make_features(64, 2880, torch.bfloat16, seed=1)
    x.copy_(fresh)
    graph.replay()
    expected_values, expected_scales = stale(64, 2880, "cpu")
    quantise(fresh, expected_values, expected_scales)
    expected = torch.empty_like(fresh)
    dequantise(expected_values, expected_scales, expected)
    assert_same_bits(out, expected)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        quantise(x, values, scales)
        dequantise(values, scales, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_work_goes_onto_the_current_stream() -> None:
    x = make_features(512, 20480, torch.bfloat16).cuda()
    values, scales = stale(512, 20480, "cuda")
    quantise(x, values, scales)
    expected = values.cpu()
    values.view(torch.uint8).fill_(0)
    # A kernel's first launch may wait for all streams while CUDA loads it.
    assert (values.view(torch.uint8) == 0).all()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
        quantise(x, values, scales)
    # The side stream still sleeps: what it was given has not run.
    assert (values.view(torch.uint8) == 0).all()
    side.synchronize()
    assert_same_bits(values, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one_are_served() -> None:
    x = make_features(24, 2880, torch.bfloat16)
    expected_values, expected_scales = stale(24, 2880, "cpu")
    quantise(x, expected_values, expected_scales)
    values, scales = stale(24, 2880, "cuda:1")
    quantise(x.to("cuda:1"), values, scales)
    out = torch.empty(24, 2880, device="cuda:1")
    dequantise(values, scales, out)
    assert_same_bits(values, expected_values)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("backing", [CudaSegment, HostSegment])
def test_a_row_goes_through_a_slot_as_it_does_on_the_cpu(backing: type) -> None:
    layout = SlotLayout(make_schema(aux_dtype="float8_e4m3fn", row_tokens=256, hidden_size=256))
    name = f"{SEGMENT_PREFIX}gpu-{os.getpid()}-{'0' * 8}-{secrets.randbits(64):016x}"
    segment = backing.create(name, 1, layout.slot_bytes, head_bytes=layout.head_bytes, gpu=0)
    device = torch.device("cuda", 0)
    try:
        filler = Float8Filler(layout)
        staging = StagingBuffers(layout, device, torch.bfloat16)
        memory = segment.slot(0)
        for used in (256, 100, 0):
            features = make_features(256, 512, torch.bfloat16, seed=used)[:used]
            filler.fill(memory, features.to(device))
            torch.cuda.synchronize()
            staging.copy_payload(memory)
            torch.cuda.synchronize()
            values, scales = stale(256, 512, "cpu")
            quantise(features, values, scales)
            expected = torch.empty(256, 512, dtype=torch.bfloat16)
            dequantise(values, scales, expected)
            assert_same_bits(staging.row.aux_hidden_states, expected)
        del memory
    finally:
        segment.close()
