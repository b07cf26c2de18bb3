"""Workers on one empty cache: what the first compiles, kernels included, the others find."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]


def start(cache: Path, holder: str) -> subprocess.Popen:
    """Start a process that compiles a tiny drafter's step and trains a few."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.compile_program", cache, "cuda", holder],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def report_of(process: subprocess.Popen) -> dict[str, Any]:
    """Wait for a process's end; return what it says of itself."""
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def kernels_in(cache: Path) -> set[str]:
    """Return the keys of compiled Triton kernels."""
    return {path.name for path in cache.glob("*/triton/*")}


def test_the_second_worker_compiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = report_of(start(tmp_path, "worker main-0"))
    kernels = kernels_in(tmp_path)
    second = report_of(start(tmp_path, "worker main-1"))
    with capsys.disabled():
        for name, report in (("first", first), ("second", second)):
            print(
                f"\n{name} worker: first steps {report['seconds_to_first_step']:.1f} s after the "
                f"process began, {report['compile_seconds']:.1f} s of it compiling and stepping",
                end="",
            )
        print()
    assert first["hits"] == 0
    assert first["misses"] > 0
    assert (second["hits"], second["misses"]) == (first["misses"], 0)
    assert kernels
    assert kernels_in(tmp_path) == kernels
    torch.testing.assert_close(second["losses"], first["losses"], rtol=1e-3, atol=1e-3)


def test_of_two_workers_that_start_at_once_one_compiles(tmp_path: Path) -> None:
    processes = [start(tmp_path, f"worker main-{index}") for index in range(2)]
    reports = sorted((report_of(process) for process in processes), key=lambda r: r["misses"])
    assert [report["misses"] > 0 for report in reports] == [False, True]
    assert reports[0]["waited_seconds"] > 0
