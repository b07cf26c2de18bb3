"""A worker on another GPU than the target's reads the ring there, whether it sees that GPU or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.ring import cuda
from common.ring.peers import gpus_without_peer_access
from tests.gpu.test_cuda_ring import READER, fill, make_owner
from tests.rings import endpoint_in

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


def visible(gpu: int, by: str) -> str:
    """Return a CUDA_VISIBLE_DEVICES that shows one GPU."""
    if by == "index":
        return str(gpu)
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    return listed[gpu]


def test_gpus_that_can_read_one_another_are_no_obstacle() -> None:
    """The machine has NVLink or peer access over PCIe; CUDA and NVML agree."""
    apart = gpus_without_peer_access(cuda.gpu_uuid(0))
    assert (apart == []) == cuda.can_read_peer(1, 0)


@pytest.mark.parametrize("by", ["index", "uuid", "all"])
def test_rows_arrive_on_another_gpu(tmp_path: Path, by: str) -> None:
    code, environment = READER, dict(os.environ)
    if by == "all":
        code = READER.replace("gpu=0", "gpu=1").replace('"cuda", 0', '"cuda", 1')
        code = code.replace("import sys, torch", "import sys, torch; torch.cuda.set_device(1)")
    else:
        environment["CUDA_VISIBLE_DEVICES"] = visible(1, by)
    count = 300
    with make_owner(tmp_path, num_slots=4) as owner:
        reader = subprocess.Popen(
            [sys.executable, "-c", code, str(endpoint_in(tmp_path)), "w"],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        for sequence in range(count):
            fill(owner, sequence)
        owner.end(count - 1)
        rows, bad, rejected = map(int, reader.communicate(timeout=120)[0].split())
    assert (rows, bad, rejected) == (count, 0, 0)
