"""What this process sees of the machine's GPUs, and whether a run on them can start. CUDA is not touched."""

from importlib import metadata

from common.config.environment import read_visible_gpus
from common.contracts.placement_messages import Gpu
from common.errors import ConfigError
from common.placement.nvml import read_gpus
from common.placement.visible import visible_gpus


def gpus_in_sight() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may take, or raise `ConfigError` where there is none."""
    variable = read_visible_gpus()
    everything = read_gpus()
    gpus = visible_gpus(everything, variable)
    if not gpus:
        there = ", ".join(gpu.uuid for gpu in everything) or "none"
        raise ConfigError(
            f"run.device = 'cuda': this process sees no GPU: CUDA_VISIBLE_DEVICES is {variable!r}, "
            f"the machine has {there}; unset it, or name one of these"
        )
    return gpus


def require_gpu() -> None:
    """Raise `ConfigError` where a run on GPUs would fail at its first step: no GPU, or no torch for one."""
    gpus_in_sight()
    version = _torch_version()
    if version.endswith("+cpu"):
        raise ConfigError(
            f"run.device = 'cuda': torch {version} is built without CUDA; install a CUDA build of it "
            f"(TORCH_INDEX of `make setup` and of compose.gpu.yaml), or run on the CPU with "
            f"run.device = 'cpu'"
        )


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # built in place; whether it knows GPUs shows later
        return ""
