"""What torch has compiled in one process is found by another, also where the folder was copied to."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)


def compile_in(cache: Path) -> dict[str, Any]:
    """Run a worker's compilation in a process of its own; return what it says of it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_program", cache, "cpu", "worker main-0"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    cache = tmp_path_factory.mktemp("cache")
    return cache, compile_in(cache)


def test_the_first_worker_compiles_and_keeps_it_in_the_folder(
    cold: tuple[Path, dict[str, Any]],
) -> None:
    cache, report = cold
    assert (report["hits"], report["misses"]) == (0, 3)
    assert report["seconds_to_first_step"] > report["compile_seconds"] > 0
    assert report["losses"] == sorted(report["losses"], reverse=True)
    (folder,) = cache.iterdir()
    assert {"inductor", "tiny-cpu.done"} <= {path.name for path in folder.iterdir()}


def test_the_second_worker_finds_all_of_it(cold: tuple[Path, dict[str, Any]]) -> None:
    cache, first = cold
    second = compile_in(cache)
    assert (second["hits"], second["misses"]) == (3, 0)
    assert second["losses"] == first["losses"]


def test_a_copied_folder_serves_as_well(cold: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    cache, first = cold
    shutil.copytree(cache, tmp_path / "copy")
    moved = tmp_path / "moved"  # so that nothing can be read where it was compiled
    cache.rename(moved)
    try:
        copied = compile_in(tmp_path / "copy")
    finally:
        moved.rename(cache)
    assert (copied["hits"], copied["misses"]) == (3, 0)
    assert copied["losses"] == first["losses"]
