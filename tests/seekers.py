"""Machines with GPUs that tests describe, and processes that take places on them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.contracts.placement_messages import Gpu

GIB = 1 << 30
FAKE_NVML = Path(__file__).parent / "fake_nvml"
WATCHDOG_SECONDS = 100


def gpu(index: int = 0, **fields: Any) -> Gpu:
    values = {
        "uuid": f"GPU-{index:04x}", "name": "H200", "index": index, "total_bytes": 140 * GIB,
        "free_bytes": 139 * GIB,
    }  # fmt: skip
    return Gpu.model_validate(values | fields)


def machine(directory: Path, num_gpus: int, **fields: Any) -> dict[str, str]:
    """Describe GPUs to whoever reads NVML with this environment."""
    gpus = [
        {"uuid": f"GPU-{index:04x}", "name": "H200", "total": 140 * GIB, "free": 139 * GIB} | fields
        for index in range(num_gpus)
    ]
    return describe(directory, gpus)


def describe(directory: Path, gpus: list[dict[str, Any]]) -> dict[str, str]:
    file = directory / "machine.json"
    file.write_text(json.dumps(gpus))
    path = os.pathsep.join([str(FAKE_NVML), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "FAKE_NVML": str(file)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


class Seeker:
    """A process that seeks a place."""

    def __init__(
        self, run: Path, environment: dict[str, str], instance: str, *settings: str,
        service: str = "drafter_worker", num_bytes: int = 10 * GIB,
    ) -> None:  # fmt: skip
        self.instance = instance
        command = (run, service, instance, str(num_bytes), *settings)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.placement_program", *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def answer(self) -> dict[str, str]:
        """Return the line that it says."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=WATCHDOG_SECONDS)
        return json.loads(line)

    def end(self, signal_number: int = signal.SIGTERM) -> None:
        self.process.send_signal(signal_number)
        self.process.communicate(timeout=WATCHDOG_SECONDS)
