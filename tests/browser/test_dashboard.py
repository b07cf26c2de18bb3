"""The page in Chromium, before a real control plane with imaginary services."""

import contextlib
import http.server
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from common.contracts.codec import encode
from common.contracts.placement_messages import GpuClaim
from tests.browser.chromium import Page
from tests.control_planes import Line, Served
from tests.heartbeats import (
    beat,
    evaluation,
    evaluator_report,
    goodbye,
    target_report,
    worker_report,
)
from tests.seekers import GIB, gpu

UUID = "GPU-8f2c1d4e-0000-1111-2222-333344445555"
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>\"&amp;"


def beat_all(line: Line, num_workers: int = 2, number: int = 1, **fields: Any) -> None:
    """Have one target, workers of two groups and an evaluator there."""
    line.ask(beat("target_server", 1, number, report=target_report()))
    for index in range(num_workers):
        report = worker_report(
            group=("main", "wide")[index % 2], index=index, gpu_uuid=UUID, step=1200 + index,
            loss=2.5 + index,
        )  # fmt: skip
        name = f"main-{index}"
        line.ask(beat("drafter_worker", 10 + index, number, instance=name, report=report, **fields))
    line.ask(beat("evaluator", 3, number, report=evaluator_report(is_following=True)))


def url_of(served: Served) -> str:
    return str(served.http.base_url)


def count(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def give_token(page: Page, served: Served) -> None:
    page.wait(lambda: page.run("return document.querySelector('#ask').open"), "the token is asked")
    page.press(served.token, Keys.ENTER)


def commands_to(line: Line, session: int, number: int) -> set[str]:
    name = f"main-{session - 10}"
    reply = line.ask(beat("drafter_worker", session, number, instance=name, report=worker_report()))
    return {command.name for command in reply.commands}


def test_the_figures_are_those_of_the_status(page: Page, served: Served, line: Line) -> None:
    beat_all(line)
    line.ask(beat("drafter_worker", 12, instance="main-2", phase="loading", detail="reads weights"))
    status = served.until(lambda status: len(status["workers"]) == 3 and status["evaluations"])
    page.open(url_of(served))
    groups, target = status["groups"], status["target"]
    shown = page.figures()
    assert shown["target tokens/s"] == count(target["tokens_per_second"]) == "1,638"
    assert shown["drafter tokens/s"] == count(sum(g["tokens_per_second"] for g in groups))
    assert shown["rows trained"] == count(sum(g["trained_rows"] for g in groups))
    assert shown["furthest step"] == "1,201"
    assert shown["ring in use"] == "38 %"
    assert page.text("#run-state") == status["run"]["state"] == "running"
    assert status["bottleneck"]["reason"] in page.text("#bottleneck")
    for row, view in zip(page.table("workers"), status["workers"], strict=True):
        report = view["report"]
        assert (row["worker"], row["detail"]) == (view["instance"], view["detail"])
        assert row["state"] == view["phase"]
        assert row["GPU"] == (UUID[:12] if report else "-")
        assert row["step"] == (count(report["step"]) if report else "-")
        assert row["loss"] == (count(report["loss"], 4) if report else "-")
        assert row["tokens/s"] == (count(report["tokens_per_second"]) if report else "-")
        assert row["last step, s ago"] == ("0.1" if report else "-")
    for row, group in zip(page.table("groups"), groups, strict=True):
        assert row["loss"] == count(group["loss"], 4)
        assert row["accepted prefix"] == count(group["accepted_prefix_length"], 3)
        assert row["held out"] == count(group["held_out_acceptance_length"], 3)
    (ring,) = page.table("rings")
    assert ring["slots"] == "free 5, published 3"
    (evaluated,) = page.table("evaluations")
    assert (evaluated["step"], evaluated["acceptance length"]) == ("5", "2.500")
    assert not page.errors()


def test_the_gpus_and_what_to_add_are_those_of_the_status(
    page: Page, served: Served, line: Line
) -> None:
    claim = GpuClaim(gpus=(gpu(0), gpu(1)), num_bytes=GIB, held="GPU-0001")

    def has_advice(status: dict[str, Any]) -> bool:
        number = next(numbers)
        worker = worker_report(trained_tokens=100 * number, starved_seconds=0.0)
        target = target_report(captured_tokens=200 * number)
        line.ask(beat("target_server", 1, number, report=target))
        line.ask(beat("drafter_worker", 10, number, instance="main-0", report=worker, claim=claim))
        return bool(status["gpus"] and status["bottleneck"]["advice"])

    numbers = itertools.count(1)
    served.until(has_advice)
    page.open(url_of(served))
    page.wait(lambda: page.text("#advice"), "the advice is shown")
    status = served.status()
    assert page.text("#advice").startswith("To add: ")
    assert "GPU-0000" in status["bottleneck"]["advice"]["text"]
    assert [(row["GPU"], row["who has it"]) for row in page.table("gpus")] == [
        ("GPU-0000", "-"), ("GPU-0001", "main-0"),
    ]  # fmt: skip
    assert not page.errors()


def test_the_charts_draw_the_history(page: Page, served: Served, line: Line) -> None:
    beat_all(line)
    page.open(url_of(served))
    wanted = "main 2.5000, wide 3.5000"
    page.wait(lambda: wanted in " ".join(labels(page)), "the loss is drawn")
    assert len(labels(page)) == 6
    assert any("target 1,638" in label for label in labels(page))
    assert any("target-0 38 %" in label for label in labels(page))
    painted = """return [...document.querySelectorAll(".plot canvas")].map(canvas => canvas
        .getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(byte => byte))"""
    assert page.run(painted) == [True] * 6
    page.find("input[value=time]").click()
    page.wait(lambda: not any("over step" in label for label in labels(page)), "the axis is time")
    events = {(row["kind"], row["about"]) for row in page.table("events")}
    assert {("join", "main-0"), ("join", "target-0"), ("evaluation", "main")} <= events


def labels(page: Page) -> list[str]:
    script = "return [...document.querySelectorAll('.plot')].map(p => p.getAttribute('aria-label'))"
    return page.run(script)


def test_each_button_works_by_keyboard_alone(page: Page, served: Served, line: Line) -> None:
    beat_all(line)
    page.open(url_of(served))
    page.tab_to("[data-command=checkpoint]")
    page.press(Keys.ENTER)
    give_token(page, served)
    page.wait(lambda: page.text("#reply") == "checkpoint: given to 2 services.", "the answer")
    assert commands_to(line, 10, 2) == {"checkpoint"}
    assert page.run("return document.activeElement.dataset.command") == "checkpoint"
    press_again(page, "pause", "pause: given to 3 services.")
    page.wait(lambda: page.text("[data-command=pause]") == "Resume", "it can be resumed")
    press_again(page, "pause", "resume: given to 3 services.")
    assert "resume" in commands_to(line, 11, 2)
    press_again(page, "evaluate", "evaluate: given to 1 service.")
    page.tab_to("button[aria-label='Drain main-1']")
    page.press(Keys.SPACE, Keys.TAB, Keys.ENTER)
    page.wait(lambda: page.text("#reply") == "drain: given to 1 service.", "the answer")
    assert "drain" in commands_to(line, 11, 3)
    assert "drain" not in commands_to(line, 10, 3)
    kinds = [
        (row["about"], row["what"]) for row in page.table("events") if row["kind"] == "command"
    ]
    assert ("run", "checkpoint, given to 2 services") in kinds


def press_again(page: Page, name: str, answer: str) -> None:
    page.tab_to(f"[data-command={name}]")
    page.press(Keys.ENTER)
    page.wait(lambda: page.text("#reply") == answer, answer)


@pytest.mark.parametrize("name", ["drain", "stop"])
def test_what_ends_a_run_is_confirmed_first(
    page: Page, served: Served, line: Line, name: str
) -> None:
    beat_all(line)
    page.open(url_of(served))
    is_open = "return document.querySelector('#confirm').open"
    for cancel in ([Keys.ESCAPE], [Keys.ENTER]):  # Cancel has the focus
        page.tab_to(f"[data-command={name}]")
        page.press(Keys.ENTER)
        assert page.run(is_open)
        page.press(*cancel)
        page.wait(lambda: not page.run(is_open), "the dialog is closed")
        assert page.run("return document.activeElement.dataset.command") == name
    assert served.status()["run"]["command"] == ""
    page.press(Keys.ENTER, Keys.TAB, Keys.ENTER)
    give_token(page, served)
    page.wait(lambda: served.status()["run"]["command"] == name, "the run is told")
    pause = "return document.querySelector('[data-command=pause]').getAttribute('aria-disabled')"
    page.wait(lambda: page.run(pause) == "true", "nothing is left to pause")
    page.find("[data-command=pause]").click()
    page.wait(lambda: f"told to {name}" in page.text("#reply"), "it says why")
    assert served.status()["run"]["command"] == name


@pytest.mark.parametrize("wrong", ["wrong", "wr\u00f6ng \u65e5"])
def test_a_wrong_token_is_asked_again_and_the_right_one_stays_in_the_tab(
    page: Page, served: Served, line: Line, wrong: str
) -> None:
    beat_all(line)
    page.open(url_of(served))
    page.find("[data-command=checkpoint]").click()
    assert str(served.directory) in page.text("#ask-text")
    page.press(wrong, Keys.ENTER)
    page.wait(lambda: "does not take" in page.text("#ask-error"), "it is refused")
    assert commands_to(line, 10, 2) == set()
    give_token(page, served)
    page.wait(lambda: "given to 2" in page.text("#reply"), "the answer")
    kept = "return [location.href, Object.values(sessionStorage), localStorage.length, document.cookie]"
    assert page.run(kept) == [f"{url_of(served).rstrip('/')}/", [served.token], 0, ""]
    page.find("#forget").click()
    assert page.run("return sessionStorage.length") == 0
    page.find("[data-command=checkpoint]").click()
    page.press(Keys.ESCAPE)
    assert commands_to(line, 11, 2) == {"checkpoint"}, "Escape gives no command"


def test_text_of_other_processes_stays_text(page: Page, served: Served, line: Line) -> None:
    line.ask(beat("target_server", 1, detail=HOSTILE, report=target_report(target=HOSTILE)))
    report = worker_report(group=HOSTILE, gpu_uuid=HOSTILE, checkpoint=HOSTILE)
    line.ask(beat("drafter_worker", 2, instance=HOSTILE, detail=HOSTILE, errors=(HOSTILE,),
                  report=report))  # fmt: skip
    result = evaluation(arm=HOSTILE, checkpoint=f"checkpoints/{HOSTILE[:9]}/0/step-1")
    line.ask(beat("evaluator", 3, detail=HOSTILE, report=evaluator_report(results=(result,))))
    page.open(url_of(served))
    page.wait(lambda: HOSTILE in " ".join(labels(page)), "the charts name it")
    page.wait(lambda: HOSTILE in page.texts("#events td"), "the events name it")
    assert page.text("#workers tbody th") == HOSTILE
    assert page.text("#errors .long") == HOSTILE
    assert page.run("return [window.hit, document.images.length, document.scripts.length]") == [
        None, 0, 2,
    ]  # fmt: skip
    assert not page.errors()


def test_nothing_comes_from_another_host(page: Page, served: Served, line: Line) -> None:
    asked: list[str] = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    beat_all(line)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page.open(url_of(served))
        names = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert names
        assert all(name.startswith(f"{url_of(served).rstrip('/')}/") for name in names), names
        place = f"http://127.0.0.1:{other.server_port}"
        tried = """
            const done = arguments[1], seen = new Set();
            document.addEventListener("securitypolicyviolation", found => {
              seen.add(found.effectiveDirective); if (seen.size === 3) done([...seen].sort()); });
            fetch(`${arguments[0]}/fetched`).catch(() => 0);
            document.body.append(Object.assign(new Image(), {src: `${arguments[0]}/image`}));
            document.body.append(Object.assign(document.createElement("script"), {text: "hit = 1"}));
        """
        blocked = page.driver.execute_async_script(tried, place)
        assert blocked == ["connect-src", "img-src", "script-src-elem"]
        other.shutdown()
    assert page.run("return window.hit") is None
    assert asked == []


def test_a_crowded_page_fits_its_window(
    page: Page, served: Served, line: Line, tmp_path: Path
) -> None:
    beat_all(line, 64)
    beat_oddities(line)
    page.open(url_of(served))
    page.wait(lambda: page.texts("#events td"), "the past is there")
    assert len(page.table("workers")) == 65
    assert page.table("workers")[0]["state"] == "failed", "who is in trouble comes first"
    assert [row["worker"] for row in page.table("workers")[1:4]] == ["main-0", "main-1", "main-2"]
    grounds = set()
    for width, scheme in itertools.product((1280, 400), ("light", "dark")):
        page.show(width, scheme=scheme)
        grounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        assert page.overflow() <= 0
        page.wait(lambda: widest_chart(page) <= width, "the charts fit")  # noqa: B023
        picture = page.screenshot(tmp_path / f"{scheme}-{width}.png")
        assert picture.stat().st_size > 10_000
    assert len(grounds) == 2


def beat_oddities(line: Line) -> None:
    """Have a worker that says too much, and one with a long name that has nothing to say."""
    line.ask(beat("drafter_worker", 10, 2, instance="main-0", detail="x" * 20_000,
                  errors=("y" * 3000,), report=worker_report()))  # fmt: skip
    failed = worker_report(loss=None, accepted_prefix_length=None, last_step_age_seconds=None)
    line.ask(beat("drafter_worker", 99, instance="n" * 200, phase="failed", report=failed))


def widest_chart(page: Page) -> float:
    script = "return Math.max(...[...document.querySelectorAll('canvas')].map(c => c.clientWidth))"
    return page.run(script)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, served: Served, line: Line, scheme: str) -> None:
    beat_all(line)
    beat_oddities(line)
    page.open(url_of(served), scheme=scheme)
    page.wait(lambda: page.texts("#events td"), "the past is there")
    for width in (1280, 400):
        page.show(width, scheme=scheme)
        assert page.violations() == []
    page.find("[data-command=drain]").click()
    assert page.violations("#confirm") == []
    page.press(Keys.TAB, Keys.ENTER)
    page.wait(lambda: page.run("return document.querySelector('#ask').open"), "it asks")
    assert page.violations("#ask") == []
    assert page.overflow() <= 0


def test_before_anybody_comes_there_is_a_page(page: Page, served: Served) -> None:
    page.open(url_of(served), 400)
    assert page.text("#run-state") == "waiting"
    assert "no target server" in page.text("#unready")
    assert page.figures()["target blocked"] == "-"
    page.wait(lambda: "Loss: nothing yet" in labels(page), "the charts are empty")
    page.find("[data-command=checkpoint]").click()
    page.wait(
        lambda: page.text("#reply") == "A worker is needed, and none is there.", "it says why"
    )
    for scheme in ("light", "dark"):
        page.show(400, scheme=scheme)
        assert page.violations() == []
    assert page.overflow() <= 0
    assert not page.errors()


def test_a_failed_run_says_who_and_why(page: Page, served: Served, line: Line) -> None:
    beat_all(line, 0)
    line.ask(beat("drafter_worker", 9, report=worker_report(loss=float("nan"))))
    line.socket.send(encode(goodbye("drafter_worker", 9, exit_code=1, reason="out of memory")))
    served.until(lambda status: status["run"]["state"] == "failed")
    page.open(url_of(served))
    assert page.text("#run-state") == "failed"
    (row,) = page.table("workers")
    assert (row["state"], row["detail"], row["loss"]) == ("running, failed", "out of memory", "-")
    assert page.table("errors")[0]["error"] == "exit code 1: out of memory"
    assert page.violations() == []


def test_focus_stays_while_the_figures_change(page: Page, served: Served, line: Line) -> None:
    beat_all(line)
    page.open(url_of(served))
    page.tab_to("button[aria-label='Drain main-1']")
    for index in (0, 1):
        report = worker_report(index=index, step=5000)
        line.ask(beat("drafter_worker", 10 + index, 2, instance=f"main-{index}", report=report))
    line.ask(beat("drafter_worker", 9, instance="a-first", report=worker_report()))
    page.wait(lambda: page.table("workers")[1]["step"] == "5,000", "the figures have changed")
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Drain main-1"


def test_a_lost_control_plane_is_told_and_one_that_is_back_goes_on(
    page: Page, directory: Path
) -> None:
    served = Served(directory, "control_plane.heartbeat_seconds=60")
    port = served.http.base_url.port
    with contextlib.closing(Line(directory)) as line:
        beat_all(line)
        page.open(url_of(served))
        page.wait(lambda: page.texts("#events td"), "the past is there")
        served.close()
        page.wait(lambda: "No connection" in page.text("#banner"), "the loss is told")
        page.wait(lambda: "old" in page.text("#age"), "the age of the figures is told")
        assert page.table("workers")[0]["step"] == "1,200", "the last figures stay"
        assert page.violations() == []
        page.find("[data-command=pause]").click()
        page.wait(lambda: "no connection" in page.text("#reply"), "it says why")
    again = Served(directory, "control_plane.heartbeat_seconds=60", f"control_plane.port={port}")
    with contextlib.closing(again), contextlib.closing(Line(directory)) as line:
        page.wait(lambda: page.text("#age") == "live", "it is back")
        assert page.text("#banner") == ""
        beat_all(line, number=2)
        page.wait(lambda: len(page.table("workers")) == 2, "the figures are back")
        page.wait(lambda: page.texts("#events td").count("control") == 2, "both starts are known")
        page.wait(lambda: "main 2.5000" in " ".join(labels(page)), "the charts go on")
    page.wait(lambda: "No connection" in page.text("#banner"), "the second loss is told")


def test_a_silent_service_is_named(page: Page, directory: Path) -> None:
    served = Served(directory, "control_plane.heartbeat_seconds=0.2")
    with contextlib.closing(served), contextlib.closing(Line(directory)) as line:
        beat_all(line, 1)
        page.open(url_of(served))
        page.wait(lambda: "no heartbeat" in page.text("#overdue"), "it is named")
        status = served.status()
        shown = page.texts("#overdue li span")
        assert len(shown) == len(status["overdue"]) == 3
        assert any(text.startswith("main-0 (pid 100, step 1200) is silent") for text in shown)
        page.wait(lambda: "watchdog" in page.texts("#events td"), "the event is there")
        assert page.table("workers")[0]["state"] == "running, silent"
        assert page.violations() == []


def test_many_checkpoints_push_no_event_of_another_kind_out(
    page: Page, served: Served, line: Line
) -> None:
    for index in range(110):
        report = worker_report(group=f"group-{index}")
        line.ask(beat("drafter_worker", 10 + index, instance=f"main-{index}", report=report))
    page.open(url_of(served))
    page.wait(lambda: "checkpoint" in page.texts("#events td"), "the checkpoints are told")
    page.wait(lambda: "last 50 of each kind" in page.text("#events"), "it says that there are more")
    texts = page.texts("#events td")
    assert texts.count("control") == 1
    assert texts.count("checkpoint") == texts.count("join") == 50
