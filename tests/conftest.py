"""What holds for every test: no ring segment without an owner stays behind."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX


def _segments_without_owner() -> set[str]:
    paths = SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*")
    return {path.name for path in paths if not _has_owner(path)}


def _has_owner(path: Path) -> bool:
    """Say whether a live process holds the segment's lock; another run beside the tests may."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True  # gone meanwhile
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    before = _segments_without_owner()
    yield
    left = _segments_without_owner() - before
    assert not left, f"left in {SEGMENT_DIRECTORY}: {sorted(left)}"
