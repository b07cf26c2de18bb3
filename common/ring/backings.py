"""The kinds of memory a ring can have, by the name that messages give them."""

from common.contracts.ring_messages import SegmentRef
from common.ring.cuda_segment import CudaSegment
from common.ring.segment import HostSegment, MemorySegment, Segment

Backing = type[HostSegment] | type[MemorySegment] | type[CudaSegment]
BACKINGS: dict[str, Backing] = {
    "host": HostSegment,
    "memory": MemorySegment,
    "cuda_ipc": CudaSegment,
}


def attach(ref: SegmentRef, gpu: int | None = None) -> Segment:
    """Map the segment that a Welcome names.

    Args:
        ref: from the wire; name, size and handle are checked.
        gpu: CUDA device ordinal that this process copies to; None on the CPU.
    """
    return BACKINGS[ref.backing].attach(ref, gpu)
