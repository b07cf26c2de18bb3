"""What the fault tests share."""

from collections.abc import Iterator

import pytest

from tests.ring_scene import Scene, make_scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Give the test a run of its own; nothing of it may be left."""
    with make_scene() as scene:
        yield scene
