"""Can another process open this GPU's memory? Asked by doing it: `python -m common.ring.probe`.

The parent makes a ring of one page on its GPU and starts a child; the child opens it by its IPC
handle, checks the proof page, and writes an answer that the parent must find. Nothing is assumed of
drivers, MIG, namespaces or permissions.
"""

import os
import secrets
import subprocess
import sys

from common.contracts.codec import Decoder, encode
from common.contracts.ring_messages import SegmentRef
from common.errors import ConfigError, RingdraftError, RingError
from common.ring.cuda_segment import CudaSegment
from common.ring.layout import PAGE_BYTES
from common.ring.segment import SEGMENT_PREFIX

ANSWER = b"opened by another process"
PROBE_SECONDS = 60.0


def why_not_cuda_ipc(gpu: int) -> str | None:
    """Return None where a round trip through CUDA IPC works, else what failed."""
    name = f"{SEGMENT_PREFIX}probe-{os.getpid()}-{'0' * 8}-{secrets.randbits(64):016x}"
    try:
        segment = CudaSegment.create(name, 1, PAGE_BYTES, gpu=gpu)
    except (RingError, ConfigError) as error:
        return str(error)
    try:
        failure = _ask_child(segment.ref, gpu)
        if failure is None and not segment.slot(0).read(0, PAGE_BYTES).startswith(ANSWER):
            failure = "what the other process wrote did not arrive"
        return failure
    finally:
        segment.close()


def _ask_child(ref: SegmentRef, gpu: int) -> str | None:
    command = [sys.executable, "-m", __spec__.name, str(gpu)]
    try:
        child = subprocess.run(
            command, input=encode(ref), capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the probe did not end within {PROBE_SECONDS:g} s"
    if child.returncode == 0:
        return None
    lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
    return f"the probe ended with {child.returncode}: {lines[-1]}"


def main() -> None:
    """Open the segment on standard input and answer in it."""
    try:
        ref = Decoder(SegmentRef).decode(sys.stdin.buffer.read())
        segment = CudaSegment.attach(ref, int(sys.argv[1]))
    except RingdraftError as error:
        sys.exit(str(error))
    segment.slot(0).write(0, ANSWER)
    segment.close()


if __name__ == "__main__":
    main()
