"""The rings of a run share its rows out: each row is of one ring, and sets survive the way over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.contracts.sequences import SequenceSet, Shard, merge_local_sets, shards_of

COUNTS = st.integers(1, 7)
SETS = st.builds(
    SequenceSet.of, st.sets(st.integers(0, 150)), low=st.integers(0, 100)
)  # fmt: skip


@given(count=COUNTS, sequence=st.integers(0, 1 << 60))
def test_each_row_is_of_one_ring_and_keeps_its_sequence(count: int, sequence: int) -> None:
    (shard,) = [shard for shard in shards_of(count) if shard.holds(sequence)]
    assert shard.to_global(shard.to_local(sequence)) == sequence


@given(count=COUNTS, total=st.integers(0, 100))
def test_a_rings_rows_are_numbered_without_gaps(count: int, total: int) -> None:
    for shard in shards_of(count):
        mine = [shard.to_local(sequence) for sequence in range(total) if shard.holds(sequence)]
        assert mine == list(range(shard.num_below(total)))


def test_a_row_of_another_ring_has_no_number_in_this_one() -> None:
    with pytest.raises(ValueError, match="row 5 is not of ring 0 of 2"):
        Shard(index=0, count=2).to_local(5)


@given(known=SETS, count=COUNTS)
def test_each_ring_gets_its_part_of_a_set_and_nothing_else(known: SequenceSet, count: int) -> None:
    for shard in shards_of(count):
        part = shard.local_set(known)
        assert all((n in part) == (shard.to_global(n) in known) for n in range(200 // count))


@given(known=SETS, before=COUNTS, after=COUNTS)
def test_a_set_goes_from_one_number_of_rings_to_another(
    known: SequenceSet, before: int, after: int
) -> None:
    stored = merge_local_sets([shard.local_set(known) for shard in shards_of(before)])
    assert stored == known
    assert merge_local_sets([shard.local_set(stored) for shard in shards_of(after)]) == known


def test_a_ring_that_lags_holds_the_low_watermark_of_the_run() -> None:
    ahead, behind = SequenceSet(low=4), SequenceSet(low=1, above=(2,))
    assert merge_local_sets([ahead, behind]) == SequenceSet(low=3, above=(4, 5, 6))


@pytest.mark.parametrize("fields", [{"index": 2, "count": 2}, {"index": -1}, {"count": 0}])
def test_a_ring_that_the_run_does_not_have_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Shard(**fields)
