"""What holds for every test: no ring segment without an owner stays behind."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.lifecycle import heavy_imports
from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX

# A control plane, for whoever asks for one.
pytest_plugins = ["tests.control_planes"]

BEFORE = pytest.StashKey[set[str]]()
LEFT = pytest.StashKey[list[str]]()


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


def _is_whole_session(config: pytest.Config) -> bool:
    """A process of several that share the tests out ends while the others' owners die on purpose."""
    return not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    with heavy_imports():
        return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE] = _segments_without_owner()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if anything stays in shared memory."""
    left = sorted(_segments_without_owner() - session.config.stash[BEFORE])
    session.config.stash[LEFT] = left
    if left and _is_whole_session(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what stays in shared memory."""
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("ERROR", red=True)
        terminalreporter.line(f"left in {SEGMENT_DIRECTORY}: {left}", red=True)
