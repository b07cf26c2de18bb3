"""The control plane's API as it documents itself: examples, refusals, fuzzing, bounded readings."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig

from common.contracts.codec import encode
from services.control_plane.history import History
from services.control_plane.readings import FRESH_SECONDS
from services.control_plane.status import Status
from tests.control_planes import Line, Served, client, refusal
from tests.heartbeats import beat, evaluator_report, goodbye, target_report, worker_report
from tests.rings import wait_until

FUZZED_INPUTS = 8


def documented(served: Served) -> dict[str, Any]:
    return served.http.get("/openapi.json").raise_for_status().json()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_and_status_code_is_documented_with_an_example(served: Served) -> None:
    document = documented(served)
    assert set(operations(document)) == {
        "GET /healthz", "GET /readyz", "GET /status", "GET /metrics", "GET /events", "GET /",
        "GET /history",
        "POST /runs/{name}", "POST /evaluations", "POST /workers/{instance}/drain",
        "POST /services/{instance}/stacks",
    }  # fmt: skip
    for name, operation in operations(document).items():
        assert operation["summary"], name
        assert operation["description"], name
        for code, answer in operation["responses"].items():
            (content,) = answer["content"].values()
            assert answer["description"], (name, code)
            assert "example" in content, (name, code)
            is_text = "application/json" not in answer["content"]
            assert is_text or "schema" in content, (name, code)
    assert document["info"]["version"] == "1"


def test_the_example_of_the_status_is_a_status(served: Served) -> None:
    answer = operations(documented(served))["GET /status"]["responses"]["200"]
    status = Status.model_validate_json(
        json.dumps(answer["content"]["application/json"]["example"])
    )
    assert (status.is_ready, status.groups[0].acceptance_length) == (True, 2.4)


def test_the_example_of_the_history_is_a_history(served: Served) -> None:
    answer = operations(documented(served))["GET /history"]["responses"]["200"]
    example = answer["content"]["application/json"]["example"]
    history = History.model_validate_json(json.dumps(example))
    assert history.samples[0].groups["main"].acceptance_length == 2.4
    assert history.events[0].kind == "join"


def test_the_history_has_samples_joins_and_commands(served: Served, line: Line) -> None:
    line.ask(beat("target_server", 1, report=target_report()))
    line.ask(beat("drafter_worker", 2, report=worker_report()))
    served.post("/runs/pause", served.token)
    served.post("/runs/resume", served.token)
    served.post("/workers/worker-0/drain", served.token)

    def past(after: float = 0.0) -> History:
        answer = served.http.get("/history", params={"after": after}).raise_for_status()
        return History.model_validate_json(answer.text)

    wait_until(lambda: bool(past().samples and past().samples[-1].groups), "a sample is taken")
    sample = past().samples[-1]
    assert (sample.target_tokens_per_second, sample.groups["main"].loss) == (1638.4, 3.25)
    assert sample.ring_used_shares == {"target-0": 0.375}
    told = [(event.kind, event.instance, event.text) for event in past().events]
    assert told[0][0] == "control"
    assert told.index(("command", "", "pause, given to 2 services")) < told.index(
        ("command", "", "resume, given to 2 services")
    )
    assert ("command", "worker-0", "drain, given to 1 service") in told
    assert ("join", "worker-0", "drafter_worker, pid 100 on here") in told
    wait_until(lambda: bool(past(sample.time).samples), "a later sample is taken")
    assert all(later.time > sample.time for later in past(sample.time).samples)
    assert all(later.time > sample.time for later in past(sample.time).events)
    for misfit in ("-1", "nan", "inf", "soon"):
        answer = served.http.get("/history", params={"after": misfit})
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("query.after: ")


def test_the_running_server_is_as_documented_whatever_it_is_sent(
    directory: Path,
) -> None:
    once_a_minute = "control_plane.heartbeat_seconds=60"  # so that one lasts for the whole test
    with (
        contextlib.closing(Served(directory, once_a_minute)) as served,
        contextlib.closing(Line(directory)) as line,
    ):
        line.ask(beat("target_server", 1, report=target_report()))
        line.ask(beat("drafter_worker", 2, report=worker_report()))
        line.ask(beat("evaluator", 3, report=evaluator_report(is_following=True)))
        failures, num_checked = fuzz(served)
        assert served.http.get("/healthz").status_code == 200
    assert not failures, "\n".join(failures)
    assert num_checked > 50


def fuzz(served: Served) -> tuple[list[str], int]:
    """Return what is not as documented, and how many answers were checked."""
    config = SchemathesisConfig.from_dict({
        "base-url": str(served.http.base_url),
        "auth": {"openapi": {"HTTPBearer": {"bearer": served.token}}},
        "generation": {"max-examples": FUZZED_INPUTS, "deterministic": True, "database": "none"},
        "phases": {"stateful": {"enabled": False}},
    })  # fmt: skip
    schema = schemathesis.openapi.from_dict(documented(served), config=config)
    # A stream without an end is no answer to a fuzzer; the tests beside this one read it.
    events = schemathesis.engine.from_schema(schema.exclude(path="/events")).execute()
    recorders = [event.recorder for event in events if hasattr(event, "recorder")]
    checked = [(r.label, checks) for r in recorders for checks in r.checks.values()]
    failures = [
        f"{label}: {check.name} {check.failure_info}"
        for label, checks in checked
        for check in checks
        if check.status.name == "FAILURE"
    ]
    return failures, len(checked)


@pytest.mark.parametrize(
    "path", ["/runs/stop", "/runs/explode", "/evaluations", "/workers/worker-0/drain",
             "/services/worker-0/stacks"],
)  # fmt: skip
def test_a_route_that_changes_the_run_needs_the_token_before_all_else(
    served: Served, line: Line, path: str
) -> None:
    line.ask(beat("drafter_worker"))
    for token in (None, "wrong"):
        answer = served.post(path, token)
        assert answer.status_code == 401
        assert "control.token" in answer.json()["detail"]
        assert answer.headers["www-authenticate"] == "Bearer"
    assert line.ask(beat("drafter_worker", number=2)).commands == ()


def test_a_drain_is_for_the_worker_that_it_names(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker", 1, instance="main-0"))
    line.ask(beat("drafter_worker", 2, instance="main-1"))
    answer = served.post("/workers/main-1/drain", served.token)
    assert (answer.status_code, answer.json()["num_recipients"]) == (202, 1)
    assert line.ask(beat("drafter_worker", 1, 2, instance="main-0")).commands == ()
    (command,) = line.ask(beat("drafter_worker", 2, 2, instance="main-1")).commands
    assert (command.name, command.number) == ("drain", answer.json()["number"])
    assert line.ask(beat("drafter_worker", 3, instance="main-2")).commands == ()


def test_a_drain_of_nobody_says_who_is_there_and_of_a_dead_one_says_so(
    served: Served, line: Line
) -> None:
    line.ask(beat("target_server", 2))
    line.ask(beat("drafter_worker", instance="main-0"))
    for unknown in ("main-7", "target-0"):
        answer = served.post(f"/workers/{unknown}/drain", served.token)
        assert answer.status_code == 404
        assert answer.json()["detail"].endswith("there are: main-0")
    served.until(lambda status: status["workers"][0]["condition"] == "silent")
    answer = served.post("/workers/main-0/drain", served.token)
    assert answer.status_code == 409
    assert "'main-0' (pid 100) is silent" in answer.json()["detail"]


def test_an_evaluation_is_asked_of_an_evaluator_that_follows(served: Served, line: Line) -> None:
    refused = served.post("/evaluations", served.token)
    line.ask(beat("evaluator", report=evaluator_report(is_following=False)))
    for answer in (refused, served.post("/evaluations", served.token)):
        assert answer.status_code == 409
        assert "launcher.follow=true" in answer.json()["detail"]
    line.ask(beat("evaluator", number=2, report=evaluator_report(is_following=True)))
    answer = served.post("/evaluations", served.token)
    assert (answer.status_code, answer.json()["num_recipients"]) == (202, 1)
    (command,) = line.ask(beat("evaluator", number=3)).commands
    assert (command.name, command.number) == ("evaluate", answer.json()["number"])


def test_two_commands_to_one_session_both_reach_it(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker"))
    served.post("/services/worker-0/stacks", served.token)
    served.post("/runs/checkpoint", served.token)
    served.post("/runs/pause", served.token)
    names = {command.name for command in line.ask(beat("drafter_worker", number=2)).commands}
    assert names == {"stacks", "checkpoint", "pause"}


def test_what_does_not_fit_is_told_in_words(served: Served) -> None:
    answer = served.post("/runs/explode", served.token)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("path.name: Input should be 'pause'")


def test_many_scrapes_are_answered_by_few_readings(served: Served) -> None:
    times: set[float] = set()

    def scrape() -> None:
        with client(str(served.http.base_url)) as http:
            for _ in range(20):
                status = http.get("/status").raise_for_status().json()
                times.add(status["time"])

    threads = [threading.Thread(target=scrape) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gaps = [
        later - earlier for earlier, later in zip(sorted(times), sorted(times)[1:], strict=False)
    ]
    assert len(times) < 160
    # A reading's time is taken a little before its freshness begins.
    assert all(gap > FRESH_SECONDS * 0.9 for gap in gaps), gaps


def test_health_is_answered_while_scrapers_crowd(served: Served) -> None:
    done = threading.Event()

    def crowd() -> None:
        with client(str(served.http.base_url)) as http:
            while not done.is_set():
                http.get("/metrics")

    threads = [threading.Thread(target=crowd) for _ in range(60)]  # more than the server's threads
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert served.http.get("/healthz").json() == {"status": "ok"}
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_beyond_loopback_it_serves_with_a_token_only(directory: Path) -> None:
    (directory / "control.token").write_text("short")
    code, text = refusal(directory, "control_plane.host=0.0.0.0")
    assert code == 2
    assert "got a token of 5 characters, expected at least 16" in text
    assert not (directory / "control.json").exists()
    (directory / "control.token").unlink()
    served = Served(directory, "control_plane.host=0.0.0.0")
    assert "127.0.0.1" in str(served.http.base_url)
    assert served.post("/runs/stop").status_code == 401
    served.close()


def test_a_goodbye_leaves_nothing_to_command(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker"))
    line.socket.send(encode(goodbye("drafter_worker")))
    served.until(lambda status: status["workers"][0]["condition"] == "ended")
    answer = served.post("/services/worker-0/stacks", served.token)
    assert answer.status_code == 409
    assert "has ended" in answer.json()["detail"]
