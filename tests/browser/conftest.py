"""A Chromium, and a control plane whose services may be silent for as long as a test takes."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.browser.chromium import Page, start_chromium, why_missing


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
def control_settings() -> tuple[str, ...]:
    return ("control_plane.heartbeat_seconds=60",)
