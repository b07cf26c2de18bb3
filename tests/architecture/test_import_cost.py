"""What must start fast never loads torch."""

import subprocess
import sys

import pytest

LIGHT_MODULES = (
    "services.launcher.cli",
    "services.control_plane.__main__",
    "services.drafter_worker.__main__",
    "services.drafter_worker.export",
    "services.target_server.__main__",
    "services.target_server.estimate",
    "services.evaluator.__main__",
    "services.quorum_server.__main__",
    "common.ring.owner",
    "common.ring.consumer",
    "common.lifecycle",
    "common.drafters.dflash.config",
    "common.drafters.dflash.lint",
    "common.placement.place",
)
HEAVY_MODULES = ("torch", "numpy", "transformers")


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY_MODULES!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
