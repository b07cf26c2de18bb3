"""Rings in GPU memory: opened by other processes, believed only after the copy, gone with their owner."""

import gc
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from common.config.shared import RingTable, RunTable
from common.errors import ConfigError, LayoutMismatchError, SegmentError
from common.ring import cuda
from common.ring.consumer import RingConsumer
from common.ring.cuda_segment import CudaSegment
from common.ring.layout import SlotLayout
from common.ring.lease import Lease
from common.ring.owner import RingOwner
from common.ring.probe import why_not_cuda_ipc
from common.ring.segment import SEGMENT_PREFIX, HostSegment, reclaim_dead_segments
from common.tensors import RowCopier, StagingBuffers, slot_tensor
from services.target_server.transport import choose_transport, transport_that_fits
from tests.rings import endpoint_in, make_groups, make_schema, make_table, segments_of, wait_until

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
GPU = 0
SCHEMA = make_schema(row_tokens=1024, hidden_size=256)
RUN = RunTable(device="cuda")


def make_owner(folder: Path, backing: type = CudaSegment, **table: object) -> RingOwner:
    patient = {"lease_seconds": 60.0, "lease_max_seconds": 60.0, "session_timeout_seconds": 60.0}
    return RingOwner(
        endpoint=endpoint_in(folder), run=f"gpu-{os.getpid()}", schema=SCHEMA,
        table=make_table(**patient | table), groups=make_groups(), backing=backing, gpu=GPU,
    )  # fmt: skip


def open_consumer(folder: Path) -> RingConsumer:
    return RingConsumer(
        endpoint=endpoint_in(folder), worker_id="w", group="main", capacity=2, gpu=GPU
    )


def fill(owner: RingOwner, sequence: int) -> None:
    """Publish a row that holds its sequence in every value."""
    slot = owner.loan(30)
    assert slot is not None
    with slot:
        slot.write("token_ids", sequence.to_bytes(4, "little") * SCHEMA.row_tokens)
        slot_tensor(owner.layout, "aux_hidden_states", slot.memory).fill_(sequence % 251)
        torch.cuda.current_stream().synchronize()
        slot.publish(sequence=sequence, split="train", used_tokens=9, documents=())


def acquire(consumer: RingConsumer) -> Lease:
    lease = consumer.acquire(30)
    assert lease is not None
    return lease


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(GPU)[0]


def segment_name() -> str:
    return f"{SEGMENT_PREFIX}gpu-{os.getpid()}-{'0' * 8}-{secrets.randbits(64):016x}"


def test_another_process_opens_this_gpu_s_memory() -> None:
    assert why_not_cuda_ipc(GPU) is None


def test_auto_chooses_cuda_ipc_and_says_why() -> None:
    transport = choose_transport(RUN, RingTable(), GPU)
    assert transport.name == "cuda_ipc"
    assert "another process opened this GPU's memory" in transport.reason
    crowded = transport_that_fits(transport, RingTable(), 1 << 50)
    assert crowded.name == "host"
    assert "bytes of GPU memory" in crowded.reason


def test_a_transport_that_cannot_be_had_is_refused_or_explained() -> None:
    checked = {"checksum_payload": True}
    transport = choose_transport(RUN, RingTable(**checked), GPU)
    assert transport.name == "host"
    assert "checksum_payload" in transport.reason
    with pytest.raises(ConfigError, match="checksum_payload"):
        choose_transport(RUN, RingTable(transport="cuda_ipc", **checked), GPU)
    chosen = choose_transport(RUN, RingTable(transport="cuda_ipc"), GPU)
    with pytest.raises(ConfigError, match=r"ring\.num_slots"):
        transport_that_fits(chosen, RingTable(transport="cuda_ipc"), 1 << 50)
    with pytest.raises(ConfigError, match="does not fit"):
        CudaSegment.create(segment_name(), 4, 1 << 50, gpu=GPU)
    assert segments_of("gpu") == []


def test_handles_that_open_nothing_or_something_else_are_refused() -> None:
    one, two = (CudaSegment.create(segment_name(), 2, 1 << 21, gpu=GPU) for _ in range(2))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=try_to_attach, args=(theirs,))
    child.start()
    swapped = one.ref.model_copy(update={"handle": two.ref.handle})
    broken = one.ref.model_copy(update={"handle": bytes(64)})
    short = one.ref.model_copy(update={"handle": b"\1" * 10})
    answers = []
    for ref in (one.ref, swapped, broken, short):
        ours.send(ref)
        assert ours.poll(60)
        answers.append(ours.recv())
    ours.send(None)
    child.join(60)
    one.close()
    two.close()
    assert answers == [
        "opened",
        LayoutMismatchError.__name__,
        SegmentError.__name__,
        SegmentError.__name__,
    ]


def try_to_attach(line: Connection) -> None:
    while (ref := line.recv()) is not None:
        try:
            CudaSegment.attach(ref, GPU).close()
            line.send("opened")
        except (LayoutMismatchError, SegmentError) as error:
            line.send(type(error).__name__)


@pytest.mark.parametrize("backing", [CudaSegment, HostSegment])
def test_staged_rows_are_what_was_written(tmp_path: Path, backing: type) -> None:
    with make_owner(tmp_path, backing) as owner:
        consumer = open_consumer(tmp_path)
        schema = consumer.schema(30)
        assert schema is not None
        buffers = StagingBuffers(SlotLayout(schema), torch.device("cuda", GPU), torch.bfloat16)
        copier = RowCopier(torch.device("cuda", GPU))
        for sequence in range(20):
            fill(owner, sequence)
            lease = acquire(consumer)
            assert copier.start(lease, buffers).finish() is None
            lease.release()
            consumer.return_buffer()
            assert (buffers.row.aux_hidden_states == sequence).all()
            assert (buffers.row.token_ids == sequence).all()
        consumer.close()


@pytest.mark.parametrize("backing", [CudaSegment, HostSegment])
def test_a_slot_that_is_rewritten_under_a_copy_is_torn(tmp_path: Path, backing: type) -> None:
    with make_owner(tmp_path, backing, num_slots=1) as owner:
        consumer = open_consumer(tmp_path)
        schema = consumer.schema(30)
        assert schema is not None
        buffers = StagingBuffers(SlotLayout(schema), torch.device("cuda", GPU), torch.bfloat16)
        fill(owner, 0)
        lease = acquire(consumer)
        memory = lease.memory
        copier = RowCopier(torch.device("cuda", GPU))
        owner._segment.slot(0).invalidate()  # as the next loan of the slot does
        assert copier.start(lease, buffers).finish() == "torn"
        del lease, memory
        consumer.close()


READER = """
import sys, torch
from pathlib import Path
from common.ring.layout import SlotLayout
from common.ring.worker_rings import WorkerRings
from common.tensors import StagingBuffers
from services.drafter_worker.feed import RowFeed
consumer = WorkerRings([Path(sys.argv[1])], worker_id=sys.argv[2], group="main", capacity=2, gpu=0)
layout = SlotLayout(consumer.schema(60))
buffers = [StagingBuffers(layout, torch.device("cuda", 0), torch.bfloat16) for _ in range(2)]
feed = RowFeed(consumer, buffers, check_targets=lambda: None)
rows = bad = 0
while not consumer.is_drained:
    row = feed.next_row(0.05)
    if row is None:
        if consumer.is_settled:
            consumer.mark_committed()
        continue
    held = row.buffers
    bad += not bool((held.aux_hidden_states == row.sequence % 251).all() & (held.token_ids == row.sequence).all())
    rows += 1
    consumer.mark_consumed({row.sequence})
    feed.give_back(row)
feed.close()
consumer.close()
print(rows, bad, feed.num_rejected)
"""


@pytest.mark.parametrize("backing", [CudaSegment, HostSegment])
def test_a_hammer_of_rows_over_two_processes_has_no_mismatch(tmp_path: Path, backing: type) -> None:
    count = 4000
    with make_owner(tmp_path, backing, num_slots=4) as owner:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(endpoint_in(tmp_path)), name],
                stdout=subprocess.PIPE, text=True,
            )
            for name in ("one", "two")
        ]  # fmt: skip
        for sequence in range(count):
            fill(owner, sequence)
        owner.end(count - 1)
        results = [
            tuple(map(int, reader.communicate(timeout=120)[0].split())) for reader in readers
        ]
    assert sum(rows for rows, _, _ in results) == count
    assert all((bad, rejected) == (0, 0) for _, bad, rejected in results)
    assert all(rows > 0 for rows, _, _ in results)


OWNER = """
import sys, time
from pathlib import Path
from tests.gpu.test_cuda_ring import fill, make_owner
owner = make_owner(Path(sys.argv[1]), num_slots=2)
fill(owner, int(sys.argv[2]))
print("published", flush=True)
time.sleep(600)
"""


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
    reclaim_dead_segments()


def start_owner(folder: Path, sequence: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(sequence)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "published"
    return process


def test_a_worker_outlives_its_owner_and_reads_the_next_one_s_memory(
    tmp_path: Path, owners: list[subprocess.Popen[str]]
) -> None:
    owners.append(start_owner(tmp_path, 7))
    consumer = open_consumer(tmp_path)
    schema = consumer.schema(60)
    assert schema is not None
    buffers = StagingBuffers(SlotLayout(schema), torch.device("cuda", GPU), torch.bfloat16)
    copier = RowCopier(torch.device("cuda", GPU))
    lease = acquire(consumer)
    owners[0].send_signal(signal.SIGKILL)
    owners[0].wait()
    # The mapping outlives its owner: the copy ends, intact or not, without a CUDA error.
    copier.start(lease, buffers).finish()
    torch.cuda.synchronize()
    lease.release()
    consumer.return_buffer()
    del lease
    reclaim_dead_segments()
    owners.append(start_owner(tmp_path, 8))
    lease = acquire(consumer)
    assert copier.start(lease, buffers).finish() is None
    assert (buffers.row.aux_hidden_states == 8).all()
    lease.release()
    consumer.close()


def test_memory_comes_back_when_rings_end(tmp_path: Path) -> None:
    use_rings(tmp_path, 10)
    before = free_bytes()
    use_rings(tmp_path, 20)  # 4 MiB each; CUDA itself takes 2 MiB at a time, once in a while
    wait_until(lambda: free_bytes() >= before - (8 << 20), "the rings' memory is free again", 10)


def use_rings(folder: Path, count: int) -> None:
    """Open rings one after the other and read a row of each."""
    for _ in range(count):
        with make_owner(folder) as owner:
            consumer = open_consumer(folder)
            assert consumer.schema(30)
            fill(owner, 0)
            acquire(consumer).release()
            consumer.close()


def test_a_host_ring_is_pinned_again_after_its_owner_s_restart(tmp_path: Path) -> None:
    consumer = None
    for sequence in range(2):
        with make_owner(tmp_path, HostSegment) as owner:
            consumer = consumer or open_consumer(tmp_path)
            fill(owner, sequence)
            lease = acquire(consumer)
            assert slot_tensor(owner.layout, "aux_hidden_states", lease.memory).is_pinned()
            lease.release()
            del lease
    assert consumer is not None
    consumer.close()


def test_gpus_are_named_as_nvidia_smi_names_them() -> None:
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    assert set(cuda.visible_gpus()) <= set(listed)
    assert cuda.visible_gpus()[cuda.gpu_uuid(GPU)] == GPU
