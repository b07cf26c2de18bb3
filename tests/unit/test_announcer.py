"""Rows are published in order, when their copies are done, and never after a failure."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.errors import NonFiniteTensorError
from common.ring.owner import RingOwner
from common.ring.segment import MemorySegment
from services.target_server.announcer import Announcer
from services.target_server.packing import PackedRow, Sample, make_row
from tests.rings import endpoint_in, make_groups, make_schema, make_table, wait_until


class Copies:
    """Copies that are done when the test says so, or fail."""

    def __init__(self, failure: Exception | None = None, *, is_done: bool = True) -> None:
        self._failure = failure
        self._done = threading.Event()
        if is_done:
            self._done.set()

    def finish(self) -> None:
        self._done.set()

    def wait(self) -> None:
        assert self._done.wait(60)
        if self._failure is not None:
            raise self._failure


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[RingOwner]:
    with RingOwner(
        endpoint=endpoint_in(tmp_path), run="announce", schema=make_schema(), table=make_table(),
        groups=make_groups(), backing=MemorySegment,
    ) as ring:  # fmt: skip
        yield ring


def make_packed_row(sequence: int) -> PackedRow:
    tokens = np.arange(9, dtype=np.int32)
    sample = Sample(sample_id=sequence, tag=0, token_ids=tokens, loss_mask=np.ones(9, np.uint8))
    return make_row([sample], 128, sequence, 0)


def submit(announcer: Announcer, owner: RingOwner, sequence: int, copies: Copies) -> None:
    slot = owner.loan(10)
    assert slot is not None
    announcer.submit(slot, make_packed_row(sequence), copies)


def test_a_row_is_published_when_its_copies_are_done_and_not_before(owner: RingOwner) -> None:
    with Announcer() as announcer:
        copies = Copies(is_done=False)
        submit(announcer, owner, 0, copies)
        submit(announcer, owner, 1, Copies())
        assert owner.report().groups[0].published == 0
        assert owner.report().slots["writing"] == 2
        copies.finish()
        wait_until(lambda: owner.report().groups[0].published == 2, "both rows are published")
    assert (announcer.num_rows, announcer.num_tokens) == (2, 18)


def test_tokens_are_counted_by_the_tags_of_the_documents(owner: RingOwner) -> None:
    tokens, mask = np.arange(5, dtype=np.int32), np.ones(5, np.uint8)
    samples = [Sample(number, number % 2, tokens, mask) for number in range(3)]
    with Announcer() as announcer:
        slot = owner.loan(10)
        assert slot is not None
        announcer.submit(slot, make_row(samples, 128, 0, 0), Copies())
    assert announcer.tokens_by_tag == {0: 10, 1: 5}


def test_close_publishes_what_was_submitted(owner: RingOwner) -> None:
    announcer = Announcer()
    for sequence in range(3):
        submit(announcer, owner, sequence, Copies())
    announcer.close()
    assert owner.report().groups[0].published == 3


def test_a_row_that_fails_gives_its_slot_back_and_ends_publishing(owner: RingOwner) -> None:
    announcer = Announcer()
    submit(announcer, owner, 0, Copies(NonFiniteTensorError("row 0 holds NaN")))
    slot = owner.loan(10)
    assert slot is not None
    wait_until(lambda: owner.report().slots["writing"] == 1, "the failed row's slot is free")
    with pytest.raises(NonFiniteTensorError, match="row 0"):
        announcer.submit(slot, make_packed_row(1), Copies())
    announcer.close()
    report = owner.report()
    assert (report.groups[0].published, report.slots["free"]) == (0, 4)
