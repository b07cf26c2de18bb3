"""The attention kernels against SDPA under the dense mask in float64, forward and backward."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.attention import (
    UNBOUNDED_WINDOW,
    BlockLayout,
    LayerWindow,
    dense_mask,
    make_layout,
    sdpa,
)
from common.drafters.dflash.block_attention import attend_blocks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """Heads, widths and a row."""

    heads: int
    kv_heads: int
    width: int
    block_size: int
    lengths: tuple[int, ...]
    num_tokens: int
    num_anchors: int


CASES = {
    "gqa": Case(8, 2, 128, 16, (300, 200), 512, 40),
    "one document": Case(4, 4, 64, 8, (700,), 700, 60),
    "odd sizes": Case(6, 3, 24, 7, (33, 20, 40), 97, 13),
    "one key head": Case(3, 1, 16, 5, (70, 30), 101, 9),
    "narrow heads": Case(4, 4, 8, 3, (20,), 24, 3),
    "block of a tile and more": Case(2, 1, 64, 80, (120, 90), 230, 6),
    "many anchors": Case(4, 1, 64, 4, (60, 60, 60), 200, 150),
}
WINDOWS = {"full": (UNBOUNDED_WINDOW, False), "narrow": (5, True), "wide": (64, True)}


def make_blocks(case: Case, window: int, is_causal: bool) -> tuple[BlockLayout, LayerWindow]:
    """Return blocks with one at a document's first token, and two that are invalid."""
    generator = torch.Generator().manual_seed(case.num_anchors)
    parts = [torch.arange(length) for length in case.lengths]
    used = sum(case.lengths)
    positions = torch.cat([*parts, torch.zeros(case.num_tokens - used, dtype=torch.int64)])
    chosen = torch.randperm(used - 1, generator=generator)[: case.num_anchors - 2]
    chosen[0] = 0
    anchors = torch.cat([chosen.sort().values, torch.zeros(2, dtype=torch.int64)])
    is_valid = torch.arange(len(anchors)) < len(chosen)
    layout = make_layout(anchors.cuda(), is_valid.cuda(), positions.int().cuda(), case.block_size)
    number = torch.tensor(window, dtype=torch.int32, device="cuda")
    return layout, LayerWindow(number, torch.tensor(is_causal, device="cuda"))


def make_inputs(case: Case, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, context k and v, block k and v, laid out as projections leave them."""
    shapes = [(case.heads, num_rows), *[(case.kv_heads, case.num_tokens)] * 2,
              *[(case.kv_heads, num_rows)] * 2]  # fmt: skip
    torch.manual_seed(0)
    return [
        torch.randn(rows, heads, case.width).to("cuda", dtype).transpose(0, 1).requires_grad_()
        for heads, rows in shapes
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_float64_attention(name: str, window: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    layout, layer = make_blocks(case, *WINDOWS[window])
    num_rows = len(layout.context_stop) * case.block_size
    inputs = make_inputs(case, num_rows, dtype)
    slope = torch.randn(case.heads, num_rows, case.width).to("cuda", dtype)
    q, ck, cv, bk, bv = inputs
    out = attend_blocks(layout, layer, q, (ck, cv), (bk, bv))
    got = [out, *torch.autograd.grad(out, inputs, slope)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    k, v = torch.cat([wide[1], wide[3]], 1), torch.cat([wide[2], wide[4]], 1)
    expected_out = sdpa(wide[0], k, v, dense_mask(layout, layer))
    expected = [expected_out, *torch.autograd.grad(expected_out, wide, slope.double())]
    for what, one, other in zip(
        ["out", "dq", "dck", "dcv", "dbk", "dbv"], got, expected, strict=True
    ):
        error = (one.double() - other).abs().max() / other.abs().max().clamp_min(1e-9)
        assert error < TOLERANCE[dtype], f"{what}: {error:.1e}"


def test_windows_and_anchors_change_between_replays_of_one_graph() -> None:
    case = CASES["gqa"]
    layout, layer = make_blocks(case, *WINDOWS["full"])
    num_rows = len(layout.context_stop) * case.block_size
    q, ck, cv, bk, bv = (x.detach() for x in make_inputs(case, num_rows, torch.float32))
    attend_blocks(layout, layer, q, (ck, cv), (bk, bv))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_blocks(layout, layer, q, (ck, cv), (bk, bv))
    for name, (window, is_causal) in WINDOWS.items():
        other, _ = make_blocks(case._replace(lengths=(200, 280)), window, is_causal)
        layout.context_start.copy_(other.context_start)
        layout.context_stop.copy_(other.context_stop)
        layer.window.fill_(window)
        layer.is_causal.fill_(is_causal)
        graph.replay()
        expected = attend_blocks(layout, layer, q, (ck, cv), (bk, bv))
        assert torch.equal(out, expected), name
