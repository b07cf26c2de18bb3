"""A short run of the fuzzer: whatever is said to the decoder and the protocols, they survive."""

import pytest

from tests.fuzz_decoder import Fuzzer
from tests.hostile import REASONS


@pytest.mark.parametrize("seed", range(4))
def test_broken_messages_are_refused_with_a_reason_or_survived(seed: int) -> None:
    fuzzer = Fuzzer(seed)
    for _ in range(2500):
        failure = fuzzer.step()
        assert failure is None, failure
    assert all(fuzzer.counts[reason] for reason in (*REASONS, "accepted")), fuzzer.counts
