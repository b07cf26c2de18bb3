"""A Chromium, and a control plane whose services may be silent for as long as a test takes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser.chromium import Page, start_chromium, why_missing
from tests.control_planes import Line, Served


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    if missing := why_missing():
        pytest.skip(missing)
    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    yield Page(driver)
    driver.get("about:blank")  # or it would go on asking a control plane that is gone


@pytest.fixture
def directory() -> Iterator[Path]:
    # Shorter than tmp_path, whose sockets could have paths of more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ringdraft-test-") as path:
        yield Path(path)


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    served = Served(directory, "control_plane.heartbeat_seconds=60")
    yield served
    served.close()


@pytest.fixture
def line(served: Served) -> Iterator[Line]:
    line = Line(served.directory)
    yield line
    line.close()
