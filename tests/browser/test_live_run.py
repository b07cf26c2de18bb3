"""The page before a real run under `ringdraft up`: its figures, and what its buttons do."""

import signal
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Page
from tests.live_runs import PATIENCE_SECONDS, Live
from tests.runs import make_run, segments_of, start

UP = "services.launcher.cli"


def press(page: Page, selector: str, *keys: str) -> None:
    page.run("document.querySelector(arguments[0]).focus()", selector)
    page.press(Keys.ENTER, *keys)


def condition(status: dict[str, Any], name: str) -> str:
    return next(view["condition"] for view in status["workers"] if view["instance"] == name)


def agrees(page: Page, live: Live) -> bool:
    """Whether the page has the figures of /status, read before and after it."""
    before = live.status()
    figures, workers = page.figures(), page.table("workers")
    status = live.status()
    steps = [view["report"]["step"] for view in status["workers"]]
    if steps != [view["report"]["step"] for view in before["workers"]]:
        return False
    (group,) = status["groups"]
    return (
        figures["rows trained"] == f"{group['trained_rows']:,}"
        and figures["rows published"] == f"{group['account']['published']:,}"
        and figures["furthest step"] == f"{group['step']:,}"
        and page.table("groups")[0]["loss"] == f"{group['loss']:.4f}"
        and [row["step"] for row in workers] == [f"{step:,}" for step in steps]
        and [row["state"] for row in workers] == [view["phase"] for view in status["workers"]]
    )


@pytest.mark.timeout(400)
def test_the_page_shows_and_steers_a_run_to_its_end(page: Page, tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=6000)
    brief = ("--set", "launcher.evaluate=false", "--set", "launcher.finish_seconds=1")
    up = start(UP, "up", "--config", config, "--workers", "2", *brief, log=tmp_path / "up.log")
    live = Live(tmp_path / "run")
    try:
        live.wait(lambda s: True, "it serves")
        page.open(live.url)
        live.wait(lambda s: s["groups"] and s["groups"][0]["step"] > 4, "it trains")
        saved = live.status()["groups"][0]["last_checkpoint"]
        press(page, "[data-command=checkpoint]")
        page.press(live.token, Keys.ENTER)
        live.wait(lambda s: s["groups"][0]["last_checkpoint"] != saved, "a checkpoint is written")
        press(page, "[data-command=pause]")
        page.wait(lambda: page.text("#run-state") == "paused", "it pauses", PATIENCE_SECONDS)
        page.wait(lambda: agrees(page, live), "the page agrees with /status")
        assert page.overflow() <= 0
        assert page.violations() == []
        page.screenshot(tmp_path / "live.png")
        trained = live.status()["groups"][0]["trained_rows"]
        press(page, "[data-command=pause]")
        live.wait(lambda s: s["groups"][0]["trained_rows"] > trained, "it goes on")
        press(page, "button[aria-label='Drain main-1']", Keys.TAB, Keys.ENTER)
        live.wait(lambda s: condition(s, "main-1") == "ended", "main-1 has ended")
        assert condition(live.status(), "main-0") == "ok"
        press(page, "[data-command=drain]", Keys.TAB, Keys.ENTER)
        assert up.wait(PATIENCE_SECONDS) == 0, (tmp_path / "up.log").read_text()
        page.wait(lambda: "has ended" in page.text("#banner"), "the end is told")
        kinds = {row["kind"] for row in page.table("events")}
        assert {"state", "join", "command", "checkpoint", "leave"} <= kinds
    finally:
        live.close()
        if up.poll() is None:
            up.send_signal(signal.SIGTERM)
            up.wait(90)
    assert not segments_of(tmp_path)
