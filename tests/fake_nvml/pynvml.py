"""The part of nvidia-ml-py that ringdraft reads, over a machine described by the file FAKE_NVML."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

NVML_DEVICE_MIG_ENABLE = 1


class NVMLError(Exception):
    pass


class NVMLError_NotFound(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
    pass


@dataclass
class Memory:
    total: int
    free: int


def nvmlInit():
    if "FAKE_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_machine())


def nvmlDeviceGetHandleByIndex(index):
    return _machine()[index]


def nvmlDeviceGetUUID(handle):
    return handle["uuid"]


def nvmlDeviceGetName(handle):
    return handle["name"].encode()  # as older releases do


def nvmlDeviceGetMemoryInfo(handle):
    return Memory(handle["total"], handle["free"])


def nvmlDeviceGetMigMode(handle):
    if handle.get("mig") is None:
        raise NVMLError_NotSupported("Not Supported")
    return (int(bool(handle["mig"])), 0)


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    found = handle["mig"].get(str(index))
    if found is None:
        raise NVMLError_NotFound("Not Found")
    return found


def _machine():
    return json.loads(Path(os.environ["FAKE_NVML"]).read_text())
