"""How soon does a worker train, on an empty cache of compiled code and on a full one? Needs a CUDA GPU.

    python -m benchmarks.warm_start --shape qwen3-8b|qwen3-4b|smollm2 [--repeats N] [--json]

Two or more processes one after the other, each from its start to the end of its first step: imports,
weights on the GPU, compiling, capturing, one row. Sizes and random weights are those of
`benchmarks.drafter_step`; reading a target from disk and waiting for its first row come on top.
`cold` is the first process, `warm` the median of the others. Files that imports and the driver read are
cached by the system in both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from common.lifecycle import process_age_seconds
from services.drafter_worker.compile_cache import CompileTurn, open_cache

_OWN = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def start_worker(shape_name: str, cache: Path) -> dict[str, Any]:
    """Compile and step in this process as a worker does; return its figures."""
    folder = open_cache(cache)
    # All that a worker imports.
    import torch

    import services.drafter_worker.assemble  # noqa: F401
    from benchmarks.drafter_step import NUM_AUX, SHAPES, make_spec, make_stepper
    from common.tensors import RowBuffers
    from services.drafter_worker.compile import cache_counts

    imported = process_age_seconds()
    shape = SHAPES[shape_name]
    spec = make_spec(shape, 0)
    tokens = shape.row_tokens
    row = RowBuffers(
        torch.randint(0, shape.vocab - 1, (tokens,), dtype=torch.int32, device="cuda"),
        torch.zeros(tokens, dtype=torch.int32, device="cuda"),
        torch.arange(tokens, dtype=torch.int32, device="cuda"),
        torch.ones(tokens, dtype=torch.uint8, device="cuda"),
        torch.randn(tokens, NUM_AUX * shape.hidden, dtype=torch.bfloat16, device="cuda"),
    )
    turn = CompileTurn(folder, shape_name, "benchmarks.warm_start")
    stepper = turn.take(
        lambda: make_stepper(shape, spec, shape.anchors, 2048),
        threading.Event(),
        partial(print, file=sys.stderr),
    )
    assert stepper is not None
    began_at = time.monotonic()
    stepper.load(row, (0, 0, 0))
    stepper.micro()
    stepper.update(1e-5)
    torch.cuda.synchronize()
    seconds = process_age_seconds()
    counts = cache_counts()
    return {
        "seconds": seconds,
        "import_seconds": imported,
        "stepper_seconds": turn.compile_seconds,
        "step_seconds": time.monotonic() - began_at,
        "hits": counts.hits,
        "misses": counts.misses,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def measure(shape: str, repeats: int) -> dict[str, Any]:
    """Start workers one after the other on a cache that is empty at first."""
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}  # noqa: TID251
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.warm_start", "--shape", shape, "--in", cache]
        workers = [
            json.loads(subprocess.check_output(command, env=environment, text=True))
            for _ in range(1 + repeats)
        ]
        size = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    cold, *warm = workers
    middle = {
        name: statistics.median(worker[name] for worker in warm)
        for name in cold
        if name.endswith("seconds")
    }
    return {
        "shape": shape,
        "device": cold["device"],
        "torch": cold["torch"],
        **{f"cold_{name}": round(cold[name], 2) for name in middle},
        **{f"warm_{name}": round(value, 2) for name, value in middle.items()},
        "cold_hits": cold["hits"],
        "cold_misses": cold["misses"],
        "warm_hits": [worker["hits"] for worker in warm],
        "warm_misses": [worker["misses"] for worker in warm],
        "cache_mib": round(size / 2**20, 1),
    }


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("qwen3-8b", "qwen3-4b", "smollm2"), default="qwen3-8b")
    parser.add_argument("--repeats", type=int, default=2, help="warm workers")
    parser.add_argument("--in", dest="cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cache:
        print(json.dumps(start_worker(options.shape, options.cache)))
        return
    result = measure(options.shape, options.repeats)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
