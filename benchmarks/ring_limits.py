"""What plain copies reach in the run that measures the ring, and what the ring's own memory does.

    python -m benchmarks.ring_limits memcpy BYTES    copies out of slots, the other of two processes
    python -m benchmarks.ring_limits ring GPU        copies out of the GPU ring named on its input

Both print "ready", wait for a line on standard input, copy, and print bytes a second.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from common.contracts.codec import Decoder, encode
from common.contracts.ring_messages import SegmentRef
from common.ring import cuda
from common.ring.cuda_segment import CudaSegment
from common.ring.segment import SEGMENT_PREFIX

NUM_SLOTS, CAPACITY = 8, 4
_REPEATS = 48
# 0.3 s: two processes on one GPU take turns of milliseconds.
_GPU_REPEATS = 2000


def limits(backing: str, num_bytes: int, device: torch.device) -> dict[str, float]:
    """Return each pass's limit in bytes a second, measured now."""
    if device.type == "cpu":
        return _memcpy_rates(num_bytes)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if backing == "cuda_ipc":
        rate = _copy_rate([torch.empty_like(source)], [source])
        return {"write": rate, "read": rate, "both": rate / 2}
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    write, read = _copy_rate([host], [source]), _copy_rate([source], [host])
    return {"write": write, "read": read, "both": _duplex_rate(host, source)}


def peer_rate(num_bytes: int, source: torch.device, target: torch.device) -> float:
    """Return bytes a second of plain copies from one device to another, or within one."""
    if source.type == "cpu":
        return _memcpy_rates(num_bytes)["read"]
    data = torch.empty(num_bytes, dtype=torch.uint8, device=source)
    ends = [torch.empty_like(data, device=target) for _ in range(CAPACITY)]
    return _copy_rate(ends, [data], _REPEATS)


def gpu_copy_rates(num_bytes: int, gpu: int) -> dict[str, float]:
    """Return the rates of copies into and out of a GPU ring's slots, alone and at once.

    By the GPU's clock, without messages: bytes a second, `both` in each direction of the two.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", gpu))
    with _segment(num_bytes, gpu) as segment:
        write = _time_on_gpu(segment, source, is_write=True)
        with _reader(segment, gpu) as (go, result):
            go()
            read = result()
        with _reader(segment, gpu) as (go, result):
            go()
            at_once = min(_time_on_gpu(segment, source, is_write=True), result())
    return {"write": write, "read": read, "both": at_once}


def peer_copy_rate(num_bytes: int, gpu: int, reader: int) -> float:
    """Return bytes a second of copies out of a GPU's ring by a process on another, by that one's clock."""
    with _segment(num_bytes, gpu) as segment, _reader(segment, reader) as (go, result):
        go()
        return result()


@contextlib.contextmanager
def _segment(num_bytes: int, gpu: int) -> Iterator[CudaSegment]:
    """Open a ring's memory on a GPU."""
    name = f"{SEGMENT_PREFIX}bench-{os.getpid()}-{'0' * 8}-{secrets.randbits(64):016x}"
    with contextlib.closing(CudaSegment.create(name, NUM_SLOTS, num_bytes, gpu=gpu)) as segment:
        yield segment


def _reader(
    segment: CudaSegment, gpu: int
) -> contextlib.AbstractContextManager[tuple[Callable[[], None], Callable[[], float]]]:
    """Start a process that copies out of the segment's slots to its own GPU."""
    return _process("ring", str(gpu), first_line=encode(segment.ref).hex())


def _copy_rate(
    destinations: list[torch.Tensor], sources: list[torch.Tensor], repeats: int = 24
) -> float:
    """Return bytes a second of plain copies that go through every buffer in turn."""
    for number in range(max(len(destinations), len(sources))):
        destinations[number % len(destinations)].copy_(sources[number % len(sources)])
    synchronize()
    start = time.perf_counter()
    for number in range(repeats):
        source = sources[number % len(sources)]
        destinations[number % len(destinations)].copy_(source, non_blocking=True)
    synchronize()
    return repeats * sources[0].nbytes / (time.perf_counter() - start)


def _memcpy_rates(num_bytes: int) -> dict[str, float]:
    """Return what one core's memcpy moves into slots and out of them; `both`: two processes' at once."""
    slots, ends = _plain_buffers(num_bytes)
    write, read = _copy_rate(slots, ends[:1]), _copy_rate(ends, slots)
    with _process("memcpy", str(num_bytes)) as (go, result):
        go()
        at_once = min(_copy_rate(slots, ends[:1], _REPEATS), result())
    return {"write": write, "read": read, "both": at_once}


def _plain_buffers(num_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return as much memory as a ring's slots and a worker's buffers take, every page touched."""
    slots, ends = (
        [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(count)]
        for count in (NUM_SLOTS, CAPACITY)
    )
    return slots, ends


def _duplex_rate(host: torch.Tensor, device: torch.Tensor) -> float:
    """Return bytes a second in each direction of plain copies both ways at once."""
    other_host, other_device = torch.empty_like(host, pin_memory=True), torch.empty_like(device)
    out, back = torch.cuda.Stream(), torch.cuda.Stream()
    synchronize()
    start = time.perf_counter()
    for _ in range(_REPEATS):
        with torch.cuda.stream(out):
            host.copy_(device, non_blocking=True)
        with torch.cuda.stream(back):
            other_device.copy_(other_host, non_blocking=True)
    synchronize()
    return _REPEATS * host.nbytes / (time.perf_counter() - start)


def _time_on_gpu(segment: CudaSegment, end: torch.Tensor, *, is_write: bool) -> float:
    """Return bytes a second of copies between every slot in turn and one tensor."""
    addresses = [segment.slot(number).address for number in range(segment.ref.num_slots)]
    begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream().cuda_stream
    for repeat in range(-NUM_SLOTS, _GPU_REPEATS):
        if repeat == 0:
            begin.record()
        slot, other = addresses[repeat % len(addresses)], end.data_ptr()
        to, source = (slot, other) if is_write else (other, slot)
        cuda.copy(to, source, end.nbytes, stream)
    done.record()
    done.synchronize()
    return _GPU_REPEATS * end.nbytes / (begin.elapsed_time(done) / 1e3)


@contextlib.contextmanager
def _process(
    *arguments: str, first_line: str = ""
) -> Iterator[tuple[Callable[[], None], Callable[[], float]]]:
    """Start this module as another process; yield what starts its copies, and what returns its rate."""
    command = [sys.executable, "-m", __spec__.name, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        stdin, stdout = other.stdin, other.stdout
        print(first_line, file=stdin)
        stdout.readline()
        yield lambda: print("go", file=stdin), lambda: float(stdout.readline())


def _wait_for_go() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def synchronize() -> None:
    """Wait for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Be the other process."""
    torch.set_num_threads(1)
    kind, number = sys.argv[1], int(sys.argv[2])
    first_line = sys.stdin.readline()
    if kind == "memcpy":
        slots, ends = _plain_buffers(number)
        _wait_for_go()
        print(_copy_rate(ends, slots, _REPEATS))
        return
    torch.cuda.set_device(number)
    segment = CudaSegment.attach(Decoder(SegmentRef).decode(bytes.fromhex(first_line)), number)
    slot_bytes = segment.ref.num_bytes // segment.ref.num_slots
    end = torch.zeros(slot_bytes, dtype=torch.uint8, device="cuda")
    _time_on_gpu(segment, end, is_write=False)  # the handle's pages and the stream are warm
    _wait_for_go()
    print(_time_on_gpu(segment, end, is_write=False))
    segment.close()


if __name__ == "__main__":
    main()
