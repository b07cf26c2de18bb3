"""Machines with GPUs that tests describe, and processes that take places on them."""

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from common.contracts.placement_messages import Gpu
from tests.forks import Fork, load_before_forks
from tests.rings import wait_until

GIB = 1 << 30
FAKE_NVML = Path(__file__).parent / "fake_nvml"
WATCHDOG_SECONDS = 100
load_before_forks("common.placement.place")


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
        self._folder = Path(tempfile.mkdtemp(prefix=f"{instance}-", dir=run.parent))
        self.process = Fork(
            "tests.placement_program", str(run), service, instance, str(num_bytes), *settings,
            environment=environment, stdout=self._folder / "said", stderr=self._folder / "log",
        )  # fmt: skip

    def answer(self) -> dict[str, str]:
        """Return the line that it says."""

        def has_said() -> bool:
            is_over = self.process.poll() is not None
            has_line = self.said().endswith("\n")
            assert has_line or not is_over, (self._folder / "log").read_text()
            return has_line

        wait_until(has_said, f"{self.instance} answers", WATCHDOG_SECONDS)
        return json.loads(self.said())

    def said(self) -> str:
        """Return all that it has said."""
        path = self._folder / "said"
        return path.read_text() if path.exists() else ""

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait(WATCHDOG_SECONDS)
