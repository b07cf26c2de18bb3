"""The ring's benchmarks run as documented and print the figures that they promise."""

import json
import subprocess
import sys

import pytest

RUNS = {
    "ring_throughput --backing host --slot-mib 1 --rows 12 --rounds 1": {
        "backing", "gbytes_per_second", "limit_gbytes_per_second", "ratio",
    },
    "announce_latency --rows 50": {"p50_us", "p99_us", "zmq_round_trip_p50_us"},
    "owner_cost --rows 200 --cases 8:2": {"owner_us_a_row"},
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", RUNS)
def test_a_benchmark_prints_one_json_line(run: str) -> None:
    module, *options = run.split()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options, "--json"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert RUNS[run] <= figures.keys()
    assert all(figures[key] > 0 for key in RUNS[run] - {"backing"})
