"""A worker that compares every byte of every row it takes with what the row must hold.

It may dwell in the middle of a copy, until its lease is over and its slot is rewritten under it: at
once when a writer has begun, or some time later. The copy has to be found torn.
"""

import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common.ring.consumer import RingConsumer
from common.ring.layout import unpack_documents
from common.ring.lease import Lease
from tests.forks import end_with_the_test
from tests.rings import documents_of
from tests.row_bytes import FIELDS, is_content

COMMIT_EVERY = 64


@dataclass(frozen=True)
class Blow:
    """What one worker is to do."""

    endpoint: str
    name: str
    results: str
    """A file for the counts, by what was found: intact or torn by the ring's own checks, and whether
    the bytes are in fact the row's."""
    dwells: float = 0.0
    """The chance of dwelling in a copy."""
    longest_dwell_seconds: float = 0.0
    seed: int = 0
    gpu: int | None = None


def hammer(blow: Blow) -> None:
    """Take rows until the stream is drained."""
    end_with_the_test()
    chance, counts, num_new = random.Random(blow.seed), Counter[str](), 0
    consumer = RingConsumer(
        endpoint=Path(blow.endpoint), worker_id=blow.name, group="main", capacity=2, gpu=blow.gpu
    )
    while not consumer.is_drained:
        lease = consumer.acquire(0.02)
        if lease is not None:
            finding = look_at(lease, blow, chance)
            counts[finding] += 1
            if not finding.startswith("intact"):
                lease.nack("torn")
                continue
            if not lease.release():
                continue
            consumer.mark_consumed({lease.descriptor.sequence})
            consumer.return_buffer()
            num_new += 1
        if num_new >= COMMIT_EVERY or (lease is None and consumer.is_settled):
            consumer.mark_committed()
            num_new = 0
    consumer.close()
    Path(blow.results).write_text(json.dumps(counts))


def look_at(lease: Lease, blow: Blow, chance: random.Random) -> str:
    """Copy a row, and say what the ring's checks say of the copy, and what its bytes say."""
    sequence, copies = lease.descriptor.sequence, {}
    dwells = chance.random() < blow.dwells
    for name in FIELDS:
        copies[name] = lease.read(name)
        if dwells and name == FIELDS[0]:
            dwell(lease, blow.longest_dwell_seconds, chance)
    table = lease.read("documents")
    is_intact = lease.is_intact(copies["token_ids"])
    is_right = is_content(sequence, copies) and unpack_documents(table, 1) == documents_of(sequence)
    return ("intact" if is_intact else "torn") + (", right" if is_right else ", wrong")


def dwell(lease: Lease, longest_seconds: float, chance: random.Random) -> None:
    """Wait for some time, or until a writer is at work in the slot: the moment to be wrong."""
    deadline = time.monotonic() + longest_seconds
    if chance.random() < 0.3:
        time.sleep(longest_seconds)
        return
    last_written = FIELDS[-2]
    before = lease.read(last_written)
    while lease.read(last_written) == before and time.monotonic() < deadline:
        time.sleep(0.0001)
