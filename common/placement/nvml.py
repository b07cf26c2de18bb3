"""The GPUs and MIG devices of this machine, as NVML describes them. CUDA is not touched."""

from collections.abc import Iterator
from typing import Any

from common.contracts.placement_messages import Gpu
from common.errors import ConfigError

_CPU = "or run on the CPU with run.device = 'cpu'"


def read_gpus() -> tuple[Gpu, ...]:
    """Return every GPU, each followed by its MIG devices; raise `ConfigError` without a driver."""
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(
            f"run.device = 'cuda' needs nvidia-ml-py to choose a GPU; pip install 'ringdraft[gpu]', {_CPU}"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"run.device = 'cuda': no NVIDIA driver answers: {error}; install it (containers: the NVIDIA "
            f"container toolkit and `deploy.resources.reservations.devices`), {_CPU}"
        ) from error
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(gpu for index, handle in enumerate(handles) for gpu in _places(index, handle))
    except pynvml.NVMLError as error:
        raise ConfigError(f"run.device = 'cuda': the GPUs cannot be listed: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _places(index: int, handle: Any) -> Iterator[Gpu]:
    import pynvml

    is_in_parts = _is_in_mig_mode(handle)
    gpu = _describe(index, handle, is_in_parts=is_in_parts)
    yield gpu
    if not is_in_parts:
        return
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError_NotFound:  # numbers have gaps
            continue
        yield _describe(index, part, parent=gpu.uuid)


def _describe(index: int, handle: Any, *, parent: str = "", is_in_parts: bool = False) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)), name=_text(pynvml.nvmlDeviceGetName(handle)),
        index=index, total_bytes=int(memory.total), free_bytes=int(memory.free), parent=parent,
        is_in_parts=is_in_parts,
    )  # fmt: skip


def _is_in_mig_mode(handle: Any) -> bool:
    import pynvml

    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # a GPU that cannot be divided
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
