"""The control plane's page in a real Chromium, for tests."""

import base64
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.rings import wait_until

PROGRAMS = ("chromium", "chromedriver")
PATIENCE_SECONDS = 30.0
# No screen, root as in containers, and nothing that looks for hosts elsewhere.
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def why_missing() -> str:
    """Return what the tests need and do not find, or an empty text."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {absent[0]} here: apt-get install chromium chromium-driver" if absent else ""


def start_chromium() -> webdriver.Chrome:
    """Return a browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(2 * PATIENCE_SECONDS)
    return driver


_AFTER_A_FRAME = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 50))"


class Page:
    """One page at a size and in a colour scheme."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> "Page":
        self.driver.get_log("browser")  # that of the page before
        self.show(width, height, scheme)
        self.driver.get(url)
        self.wait(lambda: self.text("#age") == "live", "the page has figures")
        return self

    def show(self, width: int, height: int = 900, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.driver.execute_async_script(_AFTER_A_FRAME)  # sizes are observed by then

    def wait(self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        wait_until(lambda: bool(holds()), what, seconds)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
        return self.run(script, selector)

    def table(self, name: str) -> list[dict[str, str]]:
        """Return a table's rows by their heads, with non-breaking spaces as plain ones."""
        script = """
            const texts = line => [...line.children].map(cell => cell.textContent);
            const table = document.querySelector(`#${arguments[0]} table`);
            return [texts(table.tHead.rows[0]), ...[...table.tBodies[0].rows].map(texts)];"""
        heads, *rows = self.run(script, name)
        names = [head.replace("\N{NO-BREAK SPACE}", " ") for head in heads]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def figures(self) -> dict[str, str]:
        """Return the large figures by their labels."""
        script = """return [...document.querySelectorAll("#figures > div")].map(
            figure => [figure.children[0].textContent, figure.children[1].textContent])"""
        return dict(self.run(script))

    def press(self, *keys: str) -> None:
        """Send keys to whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def tab_to(self, selector: str) -> None:
        """Go to an element by Tab alone, and see that its focus shows."""
        for _ in range(80):
            self.press(Keys.TAB)
            if self.run("return document.activeElement.matches(arguments[0])", selector):
                style = "return getComputedStyle(document.activeElement).outlineStyle"
                assert self.run(style) == "solid", selector
                return
        raise AssertionError(f"Tab does not come to {selector}")

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return self.run(
            "const root = document.documentElement; return root.scrollWidth - root.clientWidth"
        )

    def violations(self, within: str = "html") -> list[str]:
        """Return what axe finds in an element."""
        if self.run("return typeof axe") == "undefined":
            self.run(_axe_source())
        found = self.driver.execute_async_script(
            "const done = arguments[1]; axe.run(arguments[0]).then(found => done(found.violations))",
            within,
        )
        return [
            f"{fault['id']}: {node['html'][:200]} {node['failureSummary']}"
            for fault in found
            for node in fault["nodes"]
        ]

    def errors(self) -> list[str]:
        """Return what the browser complained of since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, path: Path) -> Path:
        """Write a picture of the whole page."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        path.write_bytes(base64.b64decode(shot["data"]))
        return path


def _axe_source() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")
