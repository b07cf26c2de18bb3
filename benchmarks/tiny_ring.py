"""A ring of tiny rows, where only the control path costs anything, and the workers at it.

A worker is a process of its own. It writes one clock reading to its standard output once it is
welcomed and, where asked, one a row: the moment at which its calling thread had the lease and had
compared the header. CLOCK_MONOTONIC is one clock for every process of a machine.
"""

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from common.config.shared import GroupTable, RingTable
from common.contracts.rows import RowSchema
from common.ring.consumer import RingConsumer
from common.ring.lease import Lease
from common.ring.owner import RingOwner

ROW_TOKENS = 128
OwnerT = TypeVar("OwnerT", bound=RingOwner)
MOMENT = struct.Struct("<q")
_WAIT_SECONDS = 60.0
# As often as a drafter worker's checkpoints are by default.
_ROWS_A_COMMIT = 200


def make_schema() -> RowSchema:
    """Return the schema of rows that hold next to nothing."""
    return RowSchema(
        row_tokens=ROW_TOKENS,
        max_documents=4,
        hidden_size=8,
        target_layer_ids=(0,),
        aux_dtype="bfloat16",
        has_last_hidden_states_normed=False,
        target_fingerprint="benchmark",
        template_fingerprint="benchmark",
        feature_engine="benchmark",
    )


@contextlib.contextmanager
def tiny_ring(
    num_slots: int,
    num_workers: int,
    *,
    owner_type: type[OwnerT],
    tells_moments: bool = False,
) -> Iterator[tuple[OwnerT, list["subprocess.Popen[bytes]"]]]:
    """Open a ring, start its workers and wait until each is welcomed; end the stream to close."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        endpoint = Path(folder) / "target-0.sock"
        table = RingTable(num_slots=num_slots)
        owner = owner_type(
            endpoint=endpoint,
            run="bench",
            schema=make_schema(),
            table=table,
            groups={"main": GroupTable()},
        )
        stack.enter_context(owner)
        command = [
            sys.executable,
            "-m",
            "benchmarks.tiny_ring",
            str(endpoint),
            str(int(tells_moments)),
        ]
        workers = []
        for index in range(num_workers):
            worker = subprocess.Popen([*command, f"w{index}"], stdout=subprocess.PIPE)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        for worker in workers:
            read_moment(worker)
        yield owner, workers
        for worker in workers:
            worker.wait(_WAIT_SECONDS)


def read_moment(process: "subprocess.Popen[bytes]") -> int:
    """Return the next clock reading, in nanoseconds, that a process writes."""
    assert process.stdout is not None
    raw = os.read(process.stdout.fileno(), MOMENT.size)
    if len(raw) != MOMENT.size:
        raise SystemExit("a process of the benchmark ended early; see its message above")
    return int(MOMENT.unpack(raw)[0])


def tell_moment() -> None:
    """Write the clock's reading for `read_moment`."""
    os.write(sys.stdout.fileno(), MOMENT.pack(time.perf_counter_ns()))


def pause(seconds: float) -> None:
    """Let the machine come to rest."""
    time.sleep(seconds)  # noqa: TID251 - nothing is to happen


def publish_row(owner: RingOwner, sequence: int) -> None:
    """Publish a row without writing one: only the control path costs."""
    slot = owner.loan(_WAIT_SECONDS)
    if slot is None:
        raise SystemExit("the ring stayed full for a minute")
    slot.publish(sequence=sequence, split="train", used_tokens=ROW_TOKENS, documents=())


def work(endpoint: Path, worker_id: str, *, tells_moments: bool) -> None:
    """Take, check and release every row until the stream is drained."""
    consumer = RingConsumer(endpoint=endpoint, worker_id=worker_id, group="main", capacity=2)
    with contextlib.closing(consumer):
        if consumer.schema(_WAIT_SECONDS) is None:
            sys.exit("no owner")
        tell_moment()
        num_rows = 0
        while not consumer.is_drained:
            lease = consumer.acquire(0.05)
            if lease is None:
                if consumer.is_settled:
                    consumer.mark_committed()
                continue
            check(lease)
            moment = MOMENT.pack(time.perf_counter_ns())
            lease.release()
            consumer.mark_consumed({lease.descriptor.sequence})
            consumer.return_buffer()
            num_rows += 1
            if num_rows % _ROWS_A_COMMIT == 0:
                consumer.mark_committed()
            if tells_moments:
                os.write(sys.stdout.fileno(), moment)


def check(lease: Lease) -> None:
    """Compare header and descriptor, as a worker does after its copy."""
    if not lease.is_intact(lease.read("token_ids")):
        sys.exit(f"row {lease.descriptor.sequence} is torn")


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[3], tells_moments=sys.argv[2] == "1")
