"""The one door to torch.compile and CUDA graphs. Main thread only.

Dynamo and graph state are per thread and per process: the worker compiles, captures and trains in
its main thread, and no other thread touches compiled code. After warm-up a recompile is an error.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

WARMUP_RUNS = 3
_num_warm_graphs = 0


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile into one graph of fixed shapes; a graph break is an error."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def refuse_recompiles() -> None:
    """Raise on any compilation from here on, instead of stalling or running dense."""
    global _num_warm_graphs
    _num_warm_graphs = num_graphs()
    torch.compiler.set_stance("fail_on_recompile")


def num_graphs() -> int:
    """Return how many graphs this process has compiled."""
    return int(counters["stats"]["unique_graphs"])


def num_recompiles() -> int:
    """Return how many graphs this process has compiled since `refuse_recompiles`."""
    return max(0, num_graphs() - _num_warm_graphs)


class CacheCounts(NamedTuple):
    """Graphs looked up in torch's caches by this process: AOTAutograd's, then Inductor's of both ways."""

    hits: int
    misses: int
    """Graphs that were not there, or that torch does not keep."""


def cache_counts() -> CacheCounts:
    """Return how much of what was compiled the cache had."""
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    hits, *misses = (
        int(aot[f"autograd_cache_{end}"]) + int(inductor[f"fxgraph_cache_{end}"])
        for end in ("hit", "miss", "bypass")
    )
    return CacheCounts(hits, sum(misses))


class CapturedStep:
    """Two functions as CUDA graphs in one pool, replayed on fixed buffers."""

    def __init__(self, micro: Callable[[], None], update: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_RUNS):
                micro()
                update()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        self.num_replays = 0
        self._micro, self._update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads of the worker copy rows meanwhile; only this thread's work is captured.
        for graph, function in ((self._micro, micro), (self._update, update)):
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                function()

    def micro(self) -> None:
        """Replay a micro-step."""
        self._micro.replay()
        self.num_replays += 1

    def update(self) -> None:
        """Replay an optimizer step."""
        self._update.replay()
        self.num_replays += 1
