"""How fast do rows become float8 and come back, against a plain copy of as many bytes?

    python -m benchmarks.float8_rows [--tokens 2048] [--width 20480] [--sweep] [--json]

One line for each direction. Both move at least three bytes a value, two of bfloat16 and one of
float8; the limit is a plain copy on the same device that reads half of those bytes and writes the
other half, timed in turns with the kernel. Runs rotate over sets of buffers, so that on a GPU none
finds its input in the cache; there they are replayed from a CUDA graph, so that the host's launches
(`host_microseconds_per_row`) stay out of the rate. On a CPU one thread does both. `--sweep` (GPU)
times the kernels' tilings.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from common import float8

NUM_SETS = 4
REPEATS = 40
CPU_TOKENS, GPU_TOKENS = 256, 3200
BLOCKS = (2048, 4096, 8192, 16384, 32768)
VALUES_A_THREAD = (8, 16, 32, 64, 128)
Run = Callable[[int], None]


def main() -> None:
    """Print one line for each direction, or for each tiling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=0, help="0: as many as fill a usual slot")
    parser.add_argument("--width", type=int, default=20480)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    float8.check_device(device)
    tokens = options.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    rows = Rows(tokens, options.width, device)
    if options.sweep and device.type != "cuda":
        parser.error("--sweep: the kernels' tilings need a GPU")
    for result in sweep(rows) if options.sweep else both_directions(rows):
        print(
            json.dumps(result) if options.json else "  ".join(f"{k} {v}" for k, v in result.items())
        )


class Rows:
    """Sets of buffers for rows, and a pair of plain buffers for the copy."""

    def __init__(self, tokens: int, width: int, device: torch.device) -> None:
        self.device = device
        self.shape = (tokens, width)
        self.features = [
            torch.randn(self.shape, device=device).to(torch.bfloat16) for _ in range(NUM_SETS)
        ]
        self.values = [x.to(torch.float8_e4m3fn) for x in self.features]
        self.scales = [torch.ones(tokens, device=device) for _ in range(NUM_SETS)]
        self.num_bytes = 3 * tokens * width
        plain = [
            torch.randint(0, 255, (self.num_bytes // 2,), dtype=torch.uint8, device=device)
            for _ in range(2 * NUM_SETS)
        ]
        self._plain = list(zip(plain[:NUM_SETS], plain[NUM_SETS:], strict=True))

    def quantise(self, index: int) -> None:
        """Run the shipped code on one set."""
        float8.quantise(self.features[index], self.values[index], self.scales[index])

    def dequantise(self, index: int) -> None:
        """Run the shipped code on one set."""
        float8.dequantise(self.values[index], self.scales[index], self.features[index])

    def copy(self, index: int) -> None:
        """Copy as many bytes as a kernel moves at least."""
        source, destination = self._plain[index]
        destination.copy_(source)


def both_directions(rows: Rows) -> Iterator[dict[str, object]]:
    """Time the shipped code."""
    for name, run in (("quantise", rows.quantise), ("dequantise", rows.dequantise)):
        yield compare(rows, name, run)


def sweep(rows: Rows) -> Iterator[dict[str, object]]:
    """Time every tiling of both kernels."""
    from common import float8_kernels as kernels

    for block, values_a_thread in itertools.product(BLOCKS, VALUES_A_THREAD):
        tiling = kernels.Tiling(block, values_a_thread)
        runs = {
            "quantise": lambda i, t=tiling: kernels.quantise(
                rows.features[i], rows.values[i], rows.scales[i],
                largest=float8.E4M3_MAX, least_scale=float8.LEAST_SCALE, tiling=t,
            ),
            "dequantise": lambda i, t=tiling: kernels.dequantise(
                rows.values[i], rows.scales[i], rows.features[i], tiling=t
            ),
        }  # fmt: skip
        for name, run in runs.items():
            yield {"block": block, "values_a_thread": values_a_thread, **compare(rows, name, run)}


def compare(rows: Rows, name: str, run: Run) -> dict[str, object]:
    """Return the rate of a run and of the plain copy, timed in turns."""
    clocks = {"run": make_clock(rows, run), "copy": make_clock(rows, rows.copy)}
    times: dict[str, list[float]] = {"run": [], "copy": []}
    for _ in range(REPEATS):
        for key, clock in clocks.items():
            times[key].append(clock() / NUM_SETS)
    seconds, limit_seconds = (statistics.median(times[key]) for key in ("run", "copy"))
    tokens, width = rows.shape
    result = {
        "kernel": name,
        "device": torch.cuda.get_device_name() if rows.device.type == "cuda" else "cpu",
        "tokens": tokens,
        "width": width,
        "gbytes_per_second": round(rows.num_bytes / seconds / 1e9, 2),
        "limit_gbytes_per_second": round(rows.num_bytes / limit_seconds / 1e9, 2),
        "ratio": round(limit_seconds / seconds, 3),
        "microseconds_per_row": round(seconds * 1e6, 1),
    }
    if rows.device.type == "cuda":
        result["host_microseconds_per_row"] = round(host_seconds(run) * 1e6, 1)
    return result


def make_clock(rows: Rows, run: Run) -> Callable[[], float]:
    """Return what times one run over every set of buffers, in seconds."""
    run_all(run)  # compiles, and faults pages in
    if rows.device.type == "cpu":
        return lambda: seconds_of(lambda: run_all(run))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(run)
    graph.replay()
    return lambda: seconds_on_gpu(graph.replay)


def run_all(run: Run) -> None:
    """Run once on each set of buffers."""
    for index in range(NUM_SETS):
        run(index)


def seconds_of(function: Callable[[], None]) -> float:
    """Return the time that a call takes."""
    began_at = time.perf_counter()
    function()
    return time.perf_counter() - began_at


def seconds_on_gpu(function: Callable[[], None]) -> float:
    """Return the time between two events around a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def host_seconds(run: Run) -> float:
    """Return what launching one row costs the calling thread."""
    torch.cuda.synchronize()
    seconds = statistics.median(seconds_of(lambda: run_all(run)) for _ in range(8)) / NUM_SETS
    torch.cuda.synchronize()
    return seconds


if __name__ == "__main__":
    main()
