"""Raw CUDA for the ring: memory of its own, IPC handles, pinning, small copies. No torch.

The ring's memory is one `cudaMalloc` outside torch's caching allocator: an IPC handle names a whole
allocation, and torch's may be sub-allocated, virtual or moved. GPUs are named by UUID, since ordinals
depend on each process's CUDA_VISIBLE_DEVICES. `cuda.bindings` is imported only where a GPU is used.
"""

import ctypes
import functools
import uuid
import weakref
from typing import Any

from common.errors import ConfigError, GpuError

HANDLE_BYTES = 64
# Smaller allocations share a block, and a handle would open all of it (CUDA programming guide, IPC).
_ALLOCATION_BYTES = 2 << 20
_STREAM_NON_BLOCKING = 1
_COPY_DEFAULT = 4
_HOST_REGISTER_PORTABLE = 1
_IPC_LAZY_PEER_ACCESS = 1
# A single registration of 512 GiB fails; so much at a time is well below.
_REGISTER_BYTES = 64 << 30


class DeviceMemory:
    """Memory of one GPU that this process allocates; freed with its last reference."""

    def __init__(self, gpu: int, num_bytes: int) -> None:
        use(gpu)
        size = -(-num_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
        try:
            self.address = int(call("cudaMalloc", size))
        except GpuError as error:
            free, total = call("cudaMemGetInfo")
            raise ConfigError(
                f"GPU {gpu}: a ring of {size} bytes does not fit: {free} bytes free of {total} "
                f"({error}); lower ring.num_slots or data.row_tokens"
            ) from error
        self._free = weakref.finalize(self, _quietly, "cudaFree", self.address)

    def handle(self) -> bytes:
        """Return the IPC handle of the allocation."""
        return _bytes_of(call("cudaIpcGetMemHandle", self.address), HANDLE_BYTES)


class MappedMemory:
    """Another process's allocation; unmapped with its last reference."""

    def __init__(self, gpu: int, handle: bytes) -> None:
        if len(handle) != HANDLE_BYTES:
            raise GpuError(f"IPC handle: got {len(handle)} bytes, expected {HANDLE_BYTES}")
        use(gpu)
        wire = _runtime().cudaIpcMemHandle_t()
        ctypes.memmove(int(wire.getPtr()), handle, HANDLE_BYTES)
        self.address = int(call("cudaIpcOpenMemHandle", wire, _IPC_LAZY_PEER_ACCESS))
        self._close = weakref.finalize(self, _quietly, "cudaIpcCloseMemHandle", self.address)


class PinnedMemory:
    """Page-locked host memory; freed with its last reference."""

    def __init__(self, num_bytes: int) -> None:
        self.address = int(call("cudaHostAlloc", num_bytes, _HOST_REGISTER_PORTABLE))
        self._free = weakref.finalize(self, _quietly, "cudaFreeHost", self.address)
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.address)).cast("B")
        self.view[:] = bytes(num_bytes)


class CopyStream:
    """Copies on a stream of its own, in order. Any thread may use it."""

    def __init__(self, gpu: int) -> None:
        use(gpu)
        self._stream = call("cudaStreamCreateWithFlags", _STREAM_NON_BLOCKING)
        weakref.finalize(self, _quietly, "cudaStreamDestroy", self._stream)

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy between any two addresses."""
        copy(to, source, num_bytes, self._stream)

    def wait(self) -> None:
        """Wait for every copy that was enqueued."""
        call("cudaStreamSynchronize", self._stream)


def copy(to: int, source: int, num_bytes: int, stream: Any) -> None:
    """Enqueue a copy between any two addresses, also from a GPU that this process does not see."""
    call("cudaMemcpyAsync", to, source, num_bytes, _copy_kind(), stream)


def register(address: int, num_bytes: int) -> None:
    """Page-lock a mapping in this process, so that GPU copies run at the link's rate."""
    for start in range(0, num_bytes, _REGISTER_BYTES):
        size = min(_REGISTER_BYTES, num_bytes - start)
        try:
            call("cudaHostRegister", address + start, size, _HOST_REGISTER_PORTABLE)
        except GpuError as error:
            unregister(address, start)
            raise ConfigError(
                f"{size} bytes of the ring cannot be pinned: {error}; lower ring.num_slots, or "
                f"raise the memory-lock limit (containers: ulimits.memlock: -1)"
            ) from error


def unregister(address: int, num_bytes: int) -> None:
    """Undo `register`; call before the mapping is closed."""
    for start in range(0, num_bytes, _REGISTER_BYTES):
        _quietly("cudaHostUnregister", address + start)


def gpu_uuid(gpu: int) -> str:
    """Return the UUID of a device ordinal, as nvidia-smi prints it."""
    properties = call("cudaGetDeviceProperties", gpu)
    return f"GPU-{uuid.UUID(bytes=bytes(properties.uuid.bytes)[:16])}"


def visible_gpus() -> dict[str, int]:
    """Return the device ordinal of each GPU that this process sees, by UUID."""
    return {gpu_uuid(gpu): gpu for gpu in range(int(call("cudaGetDeviceCount")))}


def can_read_peer(gpu: int, peer: int) -> bool:
    """Whether a GPU can read another one's memory."""
    return gpu == peer or bool(call("cudaDeviceCanAccessPeer", gpu, peer))


def use(gpu: int) -> None:
    """Make a GPU the calling thread's current one."""
    call("cudaSetDevice", gpu)


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime; return its result, or raise `GpuError`."""
    code, *results = getattr(_runtime(), name)(*arguments)
    if int(code) != 0:
        raise GpuError(f"{name}: {code.name} ({int(code)})")
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise ConfigError(
            "run.device = 'cuda' needs cuda-bindings; pip install 'ringdraft[gpu]'"
        ) from error
    return runtime


@functools.cache
def _copy_kind() -> Any:
    return _runtime().cudaMemcpyKind(_COPY_DEFAULT)


def _quietly(name: str, address: Any) -> None:
    """Free what may be gone already: at exit the driver can be down before this process is."""
    getattr(_runtime(), name)(address)


def _bytes_of(record: Any, num_bytes: int) -> bytes:
    """Return a C struct's bytes; the bindings name its one field differently from release to release."""
    return ctypes.string_at(int(record.getPtr()), num_bytes)
