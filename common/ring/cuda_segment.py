"""Slots in the target's GPU memory, opened by readers through CUDA IPC.

    device   slot 0 | slot 1 | ... | proof page            one cudaMalloc, one handle a ring_epoch
    /dev/shm a file of one page with the segment's name    locked by the owner for life

The file makes a GPU ring's life as plain as a host ring's: whose lock can be taken is dead, whose
file is gone is over. The proof page holds the segment's name: a reader that opens a handle and does
not find it there has opened something else, or nothing.
"""

import os

from common.contracts.ring_messages import SegmentRef
from common.errors import GpuError, LayoutMismatchError, SegmentError
from common.ring import cuda
from common.ring.layout import PAGE_BYTES
from common.ring.segment import HostSegment

_owned: dict[str, cuda.DeviceMemory] = {}
"""Rings of this process by name: CUDA does not open a handle in the process that made it."""


class CudaSegment:
    """One ring's memory on a GPU."""

    def __init__(
        self,
        ref: SegmentRef,
        marker: HostSegment,
        memory: cuda.DeviceMemory | cuda.MappedMemory,
        gpu: int,
        head_bytes: int = PAGE_BYTES,
    ) -> None:
        self.ref = ref
        self._marker = marker
        self._memory: cuda.DeviceMemory | cuda.MappedMemory | None = memory
        self._stream = cuda.CopyStream(gpu)
        self._gpu = gpu
        self._head_bytes = head_bytes
        self._heads = cuda.PinnedMemory(ref.num_slots * head_bytes)

    @classmethod
    def create(
        cls,
        name: str,
        num_slots: int,
        slot_bytes: int,
        *,
        head_bytes: int = PAGE_BYTES,
        gpu: int | None = None,
    ) -> "CudaSegment":
        """Allocate a ring on a GPU of this process; raise `ConfigError` where it does not fit."""
        if gpu is None:
            raise GpuError(f"segment {name!r}: cuda_ipc needs a GPU; set run.device = 'cuda'")
        marker = HostSegment.create(name, 1, PAGE_BYTES)
        try:
            num_bytes = num_slots * slot_bytes
            memory = cuda.DeviceMemory(gpu, num_bytes + PAGE_BYTES)
            ref = SegmentRef(
                backing="cuda_ipc",
                name=name,
                num_bytes=num_bytes,
                num_slots=num_slots,
                owner_pid=os.getpid(),
                gpu_uuid=cuda.gpu_uuid(gpu),
                handle=memory.handle(),
            )
            segment = cls(ref, marker, memory, gpu, head_bytes)
            segment._copy_in(num_bytes, _proof(name))
        except BaseException:
            marker.close()
            raise
        _owned[name] = memory
        return segment

    @classmethod
    def attach(cls, ref: SegmentRef, gpu: int | None = None) -> "CudaSegment":
        """Open an owner's ring; what comes from the wire is checked, and the memory is read once."""
        if gpu is None:
            raise SegmentError(
                f"segment {ref.name!r} is memory of {ref.gpu_uuid}, and this worker has no GPU; "
                f"set run.device = 'cuda', or ring.transport = 'host' for both sides"
            )
        marker_ref = ref.model_copy(
            update={"backing": "host", "num_bytes": PAGE_BYTES, "num_slots": 1}
        )
        marker = HostSegment.attach(marker_ref)
        try:
            memory = _open(ref, gpu)
            segment = cls(ref, marker, memory, gpu)
            if segment._copy_out(ref.num_bytes, PAGE_BYTES) != _proof(ref.name):
                raise LayoutMismatchError(
                    f"segment {ref.name!r}: its IPC handle opens other memory; message refused"
                )
        except BaseException:
            marker.close()
            raise
        return segment

    def slot(self, index: int) -> "CudaSlot":
        """Return one slot's bytes; raise `SegmentError` after `close`."""
        if self._memory is None:
            raise SegmentError(f"segment {self.ref.name!r} is closed")
        start = index * (self.ref.num_bytes // self.ref.num_slots)
        return CudaSlot(
            address=self._memory.address + start,
            gpu=self._gpu,
            head=self._heads,
            head_start=index * self._head_bytes,
            head_bytes=self._head_bytes,
            stream=self._stream,
            memory=self._memory,
        )

    def is_removed(self) -> bool:
        """Whether the owner closed the ring, or its remains were reclaimed."""
        return self._marker.is_removed()

    def close(self) -> None:
        """Drop the memory; the owner removes the file first, so no newcomer opens a dying ring."""
        if self._memory is None:
            return
        if self._marker.is_owner:
            del _owned[self.ref.name]
        self._marker.close()
        self._memory = None

    def _copy_in(self, offset: int, data: bytes) -> None:
        self.slot(0).write(offset, data)

    def _copy_out(self, offset: int, num_bytes: int) -> bytes:
        return self.slot(0).read(offset, num_bytes)


class CudaSlot:
    """A slot in GPU memory, with its head (header page and small fields) in pinned host memory.

    Every call ends with a wait for its copies, so that the order of calls is the order on the GPU.
    """

    def __init__(
        self,
        *,
        address: int,
        gpu: int,
        head: cuda.PinnedMemory,
        head_start: int,
        head_bytes: int,
        stream: cuda.CopyStream,
        memory: cuda.DeviceMemory | cuda.MappedMemory,
    ) -> None:
        self.address = address
        self.gpu: int | None = gpu
        self.view = head.view[head_start : head_start + head_bytes]
        self._head_address = head.address + head_start
        self._stream = stream
        self._keepers = (head, memory)
        """Keep both mapped for as long as this slot is held."""

    def invalidate(self) -> None:
        """Zero the header page on the GPU."""
        self.view[:PAGE_BYTES] = bytes(PAGE_BYTES)
        self._stream.copy(self.address, self._head_address, PAGE_BYTES)
        self._stream.wait()

    def publish_header(self, header: bytes) -> None:
        """Send the small fields, then the header, in one stream's order."""
        self.view[: len(header)] = header
        small = len(self.view) - PAGE_BYTES
        if small:
            self._stream.copy(self.address + PAGE_BYTES, self._head_address + PAGE_BYTES, small)
        self._stream.copy(self.address, self._head_address, PAGE_BYTES)
        self._stream.wait()

    def read_header(self) -> bytes:
        """Read the header page from the GPU."""
        self._stream.copy(self._head_address, self.address, PAGE_BYTES)
        self._stream.wait()
        return bytes(self.view[:PAGE_BYTES])

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the slot on the GPU; slow, for tests and tools."""
        pinned = cuda.PinnedMemory(num_bytes)
        self._stream.copy(pinned.address, self.address + offset, num_bytes)
        self._stream.wait()
        return bytes(pinned.view)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the slot on the GPU; slow, for tests and tools."""
        pinned = cuda.PinnedMemory(len(data))
        pinned.view[:] = data
        self._stream.copy(self.address + offset, pinned.address, len(data))
        self._stream.wait()
        end = min(offset + len(data), len(self.view))
        if offset < end:
            self.view[offset:end] = pinned.view[: end - offset]


def _open(ref: SegmentRef, gpu: int) -> cuda.DeviceMemory | cuda.MappedMemory:
    """Open the handle on the GPU of this process that can read it."""
    own = _owned.get(ref.name)
    if own is not None:
        return own
    source = cuda.visible_gpus().get(ref.gpu_uuid)
    if source is not None and not cuda.can_read_peer(gpu, source):
        raise SegmentError(
            f"segment {ref.name!r}: this worker's GPU cannot read memory of {ref.gpu_uuid} (no peer "
            f"access); set ring.transport = 'host'"
        )
    try:
        return cuda.MappedMemory(gpu, ref.handle)
    except GpuError as error:
        raise SegmentError(
            f"segment {ref.name!r} on {ref.gpu_uuid} cannot be opened: {error}; worker and target "
            f"server must share PID and IPC namespaces and see the GPU (containers: pid and ipc of "
            f"one service), or set ring.transport = 'host'"
        ) from error


def _proof(name: str) -> bytes:
    return name.encode().ljust(PAGE_BYTES, b"\0")
