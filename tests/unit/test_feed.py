"""The feed stages whole rows, gives back what it cannot believe, and waits within bounds."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.contracts.rows import DocumentSpan, RowSchema
from common.errors import PeerLostError
from common.float8 import quantise
from common.ring.layout import SlotLayout
from common.ring.owner import RingOwner
from common.ring.segment import MemorySegment
from common.ring.worker_rings import WorkerRings
from common.tensors import RowBuffers, StagingBuffers, slot_tensor
from services.drafter_worker.feed import RowFeed
from services.drafter_worker.stream import TargetWatch
from tests.rings import endpoint_in, make_groups, make_schema, make_table

CPU = torch.device("cpu")


@pytest.fixture
def schema() -> RowSchema:
    return make_schema()


@pytest.fixture
def owner(tmp_path: Path, schema: RowSchema) -> Iterator[RingOwner]:
    with RingOwner(
        endpoint=endpoint_in(tmp_path), run="feed", schema=schema, groups=make_groups(),
        table=make_table(checksum_payload=True, max_attempts=2), backing=MemorySegment,
    ) as ring:  # fmt: skip
        yield ring


@pytest.fixture
def feed(tmp_path: Path, owner: RingOwner) -> Iterator[RowFeed]:
    rings = WorkerRings([endpoint_in(tmp_path)], worker_id="w", group="main", capacity=2)
    schema = rings.schema(10)
    buffers = [StagingBuffers(SlotLayout(schema), CPU, torch.float32) for _ in range(2)]
    rows = RowFeed(
        rings,
        buffers,
        check_targets=TargetWatch(tmp_path, rings, timeout_seconds=1.0).check,
    )
    yield rows
    rows.close()
    rings.close()


def publish(owner: RingOwner, sequence: int, *, corrupt: bool = False) -> None:
    slot = owner.loan(10)
    with slot:
        aux = slot_tensor(owner.layout, "aux_hidden_states", slot.memory)
        aux.fill_(sequence + 0.5)
        documents = (DocumentSpan(sample_id=sequence, tag=0, start=0, length=9),)
        view = slot.memory.view
        slot.publish(sequence=sequence, split="train", used_tokens=9, documents=documents)
        if corrupt:
            view[-1] ^= 0xFF


def test_staged_rows_are_copies_that_outlive_their_slot(owner: RingOwner, feed: RowFeed) -> None:
    publish(owner, 0)
    row = feed.next_row(10)
    assert (row.sequence, row.used_tokens) == (0, 9)
    for sequence in range(1, 3):
        publish(owner, sequence)
    assert (row.buffers.aux_hidden_states == 0.5).all()
    feed.give_back(row)


@pytest.mark.parametrize("schema", [make_schema(aux_dtype="float8_e4m3fn")])
def test_rows_in_float8_are_staged_wide_token_by_token_with_its_scale(
    owner: RingOwner, feed: RowFeed
) -> None:
    features = torch.randn(9, 16) * torch.logspace(-3, 3, 9)[:, None]
    with owner.loan(10) as slot:
        values, scales = (
            slot_tensor(owner.layout, name, slot.memory)
            for name in ("aux_hidden_states", "aux_scales")
        )
        quantise(features, values, scales)
        slot.publish(sequence=0, split="train", used_tokens=9, documents=())
    staged = feed.next_row(10).buffers.aux_hidden_states
    assert staged.dtype == torch.float32
    assert (staged[9:] == 0).all()
    errors = (staged[:9] - features).norm(dim=-1) / features.norm(dim=-1)
    assert (errors < 0.05).all(), errors


@pytest.mark.parametrize("schema", [make_schema(has_last_hidden_states_normed=True)])
def test_last_hidden_states_are_staged_where_rows_carry_them(
    owner: RingOwner, feed: RowFeed
) -> None:
    given = torch.randn(128, 8).bfloat16()
    with owner.loan(10) as slot:
        slot_tensor(owner.layout, "last_hidden_states_normed", slot.memory).copy_(given)
        slot.publish(sequence=0, split="train", used_tokens=9, documents=())
    staged = feed.next_row(10).buffers
    assert staged.last_hidden_states_normed.dtype == torch.float32
    assert torch.equal(staged.last_hidden_states_normed, given.float())
    static = RowBuffers.allocate(
        make_schema(has_last_hidden_states_normed=True), CPU, torch.float32
    )
    static.copy_from(staged)
    assert torch.equal(static.last_hidden_states_normed, given.float())


def test_no_more_rows_are_staged_than_there_are_buffers(owner: RingOwner, feed: RowFeed) -> None:
    for sequence in range(4):
        publish(owner, sequence)
    held = [feed.next_row(10), feed.next_row(10)]
    assert feed.next_row(0.3) is None
    feed.give_back(held[0])
    assert feed.next_row(10).sequence == 2


def test_a_corrupt_payload_is_given_back_until_it_is_poison(
    owner: RingOwner, feed: RowFeed
) -> None:
    publish(owner, 0)
    publish(owner, 1)
    held = [feed.next_row(10), feed.next_row(10)]
    # Without a free buffer the worker takes no lease: the byte changes before anyone copies it.
    publish(owner, 2, corrupt=True)
    for row in held:
        feed.give_back(row)
    publish(owner, 3)
    assert feed.next_row(10).sequence == 3
    deadline = time.monotonic() + 10
    while owner.report().groups[0].poison == 0:
        assert time.monotonic() < deadline
    assert feed.num_rejected == 2, "one for each attempt"


def test_a_target_that_stays_silent_is_an_error_that_says_what_to_do(
    owner: RingOwner, feed: RowFeed
) -> None:
    owner.close()
    # The prefetch thread finds out; `next_row` raises what it found.
    feed._thread.join(30)
    with pytest.raises(PeerLostError, match="target_timeout_seconds"):
        feed.next_row(0.2)
