"""A target server and workers on the machine's own GPUs, by leases of a control plane."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.lifecycle import EXIT_NO_PLACE
from common.placement.nvml import read_gpus
from tests.control_planes import Served
from tests.heartbeats import RUN
from tests.runs import make_run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]
WAIT_SECONDS = 240.0
SETTINGS = (
    "run.device=cuda", "drafter.head_dim=32", "drafter.num_heads=4", "drafter.num_kv_heads=2",
    "drafter.compile=false", "drafter.cuda_graphs=false", "placement.workers_per_gpu=1",
    "placement.wait_seconds=3", "target.dtype=bfloat16",
)  # fmt: skip


class Run:
    """A control plane, and services as processes of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self._config = make_run(directory, num_conversations=4000)
        self.control = Served(self.directory, "placement.workers_per_gpu=1")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, service: str, name: str) -> subprocess.Popen[bytes]:
        values = (f"run.name={RUN}", f"run.directory={self.directory}", *SETTINGS)
        options = [part for value in values for part in ("--set", value)]
        command = [sys.executable, "-m", f"services.{service}", "--config", self._config, *options]
        with self.log(name).open("wb") as log:
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self._started[-1]

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def worker_that_steps(self) -> dict[str, Any]:
        """Return a worker of /status behind its first step."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for worker in self.control.status()["workers"]:
                if (worker["report"] or {}).get("step"):
                    return worker
            time.sleep(0.5)
        raise AssertionError("\n".join(log.read_text() for log in self.directory.glob("*.log")))

    def close(self) -> None:
        for process in self._started:
            process.terminate()  # a target server that is killed leaves its ring behind
        for process in self._started:
            process.wait(WAIT_SECONDS)
        self.control.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def shown_to_cuda(uuid: str) -> dict[str, Any]:
    """Return what a process sees to which CUDA shows one GPU."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'count': torch.cuda.device_count(), 'uuid': f'GPU-{p.uuid}', 'total': p.total_memory}))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_nvml_and_cuda_mean_the_same_gpu_by_a_uuid() -> None:
    gpus = [gpu for gpu in read_gpus() if not gpu.is_in_parts and not gpu.parent]
    assert gpus
    for gpu in gpus:
        seen = shown_to_cuda(gpu.uuid)
        assert (seen["count"], seen["uuid"]) == (1, gpu.uuid)
        assert 0 < gpu.free_bytes <= gpu.total_bytes
        assert seen["total"] == pytest.approx(gpu.total_bytes, rel=0.05)


def test_target_and_worker_train_on_leased_gpus_and_a_worker_too_many_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.start("target_server", "target")
    run.start("drafter_worker", "worker")
    worker = run.worker_that_steps()
    status = run.control.status()
    holders = {
        holder["instance"]: (gpu["uuid"], holder["num_bytes"])
        for gpu in status["gpus"] for holder in gpu["holders"]
    }  # fmt: skip
    uuid, estimate = holders["main-0"]
    assert worker["report"]["gpu_uuid"] == uuid
    assert worker["report"]["device"] == "cuda"
    for name in ("target", "worker"):
        assert "granted by the control plane" in run.log(name).read_text()
    places = {gpu["uuid"] for gpu in status["gpus"]}
    # One GPU is shared; of several, the worker takes another than the target's.
    assert (holders["target-0"][0] == uuid) == (len(places) == 1)
    with capsys.disabled():
        print(
            f"\nworker: estimate {estimate >> 20} MiB, {worker['report']['memory_bytes'] >> 20} MiB of "
            f"tensors; transport {status['transport']}; gpus {json.dumps(status['gpus'])}"
        )
    if len(places) > 1:
        return
    extra = run.start("drafter_worker", "extra")
    assert extra.wait(WAIT_SECONDS) == EXIT_NO_PLACE
    said = run.log("extra").read_text()
    (index,) = (gpu.index for gpu in read_gpus() if gpu.uuid == uuid)
    assert f"{uuid} ({index}, " in said
    assert "has 1 of 1 workers (main-0)" in said
    assert "raise placement.workers_per_gpu" in said
