"""What holds for every test: no ring segment stays behind."""

from collections.abc import Iterator

import pytest

from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX


def _segments() -> set[str]:
    return {path.name for path in SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*")}


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    before = _segments()
    yield
    left = _segments() - before
    assert not left, f"left in {SEGMENT_DIRECTORY}: {sorted(left)}"
