"""The control plane as a process: real HTTP, real sockets, restarts, refusals."""

import contextlib
import json
import math
import queue
import re
import signal
import socket
from pathlib import Path

import pytest

from common.config.shared import ControlPlaneTable
from common.contracts.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, encode
from common.contracts.control_messages import Command
from common.errors import ConfigError
from common.telemetry.control_link import ControlLink, Identity, ServiceState
from services.control_plane.server import listen
from tests.control_planes import WATCHDOG_SECONDS, Line, Served, refusal, samples
from tests.heartbeats import (
    RUN,
    beat,
    evaluation,
    evaluator_report,
    goodbye,
    target_report,
    worker_report,
)


def test_it_says_where_it_serves_and_cleans_up(directory: Path) -> None:
    served = Served(directory)
    named = json.loads((directory / "control.json").read_text())
    assert named == {"url": str(served.http.base_url).rstrip("/"), "pid": served.process.pid}
    assert served.http.get("/healthz").json() == {"status": "ok"}
    assert served.close() == 0
    left = {path.name for path in directory.iterdir()}
    assert left == {"control.lock", "control.token"}


def test_readiness_names_its_reason_until_target_and_worker_run(served: Served, line: Line) -> None:
    answer = served.http.get("/readyz")
    assert answer.status_code == 503
    assert "no target server with a ring" in answer.json()["reason"]
    line.ask(beat("target_server", 1, report=target_report()))
    served.until(lambda status: status["rings"])
    answer = served.http.get("/readyz")
    assert answer.status_code == 503
    assert "no drafter worker runs" in answer.json()["reason"]
    line.ask(beat("drafter_worker", 2, report=worker_report()))
    served.until(lambda status: status["workers"])
    answer = served.http.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"is_ready": True, "reason": ""})


def test_status_and_metrics_give_the_figures_of_the_heartbeats(served: Served, line: Line) -> None:
    line.ask(beat("target_server", 1, report=target_report()))
    line.ask(beat("drafter_worker", 2, report=worker_report()))
    line.ask(beat("evaluator", 3, report=evaluator_report()))
    status = served.status()
    assert status["schema_version"] == 1
    assert status["transport"] == {"chosen": "host", "reason": "no GPU here"}
    assert status["rings"][0]["slots"] == {"free": 5, "published": 3}
    assert status["workers"][0]["report"] == worker_report().model_dump(mode="json")
    assert status["target"]["instances"][0]["report"] == target_report().model_dump(mode="json")
    assert status["evaluations"][0]["acceptance_length"] == 2.5

    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=1.0.0")
    metrics = samples(response.text)
    target, worker, ring = (status["target"]["instances"][0]["report"],
                            status["workers"][0]["report"], status["rings"][0])  # fmt: skip
    of_worker = 'group="main",index="0",instance="worker-0"'
    expected = {
        'target_blocked_seconds_total{instance="target-0"}': target["blocked_seconds"],
        'target_capture_seconds_total{instance="target-0"}': target["capture_seconds"],
        'target_captured_tokens_total{instance="target-0"}': target["captured_tokens"],
        'target_captured_tokens_by_tag_total{instance="target-0",tag="code"}': 96,
        f"drafter_starved_seconds_total{{{of_worker}}}": worker["starved_seconds"],
        f"drafter_sync_seconds_total{{{of_worker}}}": worker["sync_seconds"],
        f"drafter_group_members{{{of_worker}}}": 2,
        f"drafter_trained_tokens_total{{{of_worker}}}": worker["trained_tokens"],
        f"drafter_step_seconds{{{of_worker}}}": worker["step_seconds"],
        f'drafter_acceptance_rate_at{{{of_worker},position="1"}}': worker["acceptance_rate_at"][1],
        f'drafter_replay_acceptance_length{{context="under 256",{of_worker},tag="chat"}}': worker[
            "held_out"
        ][1]["acceptance_length"],
        'ring_slots{instance="target-0",state="free"}': ring["slots"]["free"],
        'ring_published_total{group="main",instance="target-0"}': ring["groups"][0]["published"],
        'ring_reclaimed_total{instance="target-0",reason="expired"}': ring["reclaimed"]["expired"],
        'ring_stale_calls_total{call="release",instance="target-0"}': ring["stale_calls"][
            "release"
        ],
        'ring_lease_age_seconds{instance="target-0"}': ring["oldest_lease_seconds"],
        'ring_epoch{instance="target-0"}': float(int(ring["ring_epoch"], 16)),
        'evaluator_acceptance_length{arm="main",group="main",index="0",step="5",temperature="0"}': 2.5,
    }
    assert {name: metrics.get(name) for name in expected} == expected


def test_a_loss_that_is_not_a_number_breaks_no_route(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker", report=worker_report(loss=math.nan)))
    assert served.status()["workers"][0]["report"]["loss"] is None
    loss = samples(served.http.get("/metrics").text)[
        'drafter_loss{group="main",index="0",instance="worker-0"}'
    ]
    assert math.isnan(loss)
    assert served.until(lambda status: True)["workers"][0]["report"]["loss"] is None


def test_malformed_messages_are_counted_and_survived(served: Served, line: Line) -> None:
    line.socket.send(b"\xc1")
    line.socket.send(b"")
    line.socket.send_multipart([b"two", b"frames"])
    line.socket.send(encode(Command(name="stop", number=1)))
    line.socket.send(
        encode(beat("evaluator")).replace(bytes([0x93, PROTOCOL_VERSION]), b"\x93\x63", 1)
    )
    line.socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    line.ask(beat("drafter_worker"))
    status = served.status()
    assert status["refused_messages"] == {
        "malformed": 3, "unknown_type": 1, "wrong_version": 1, "oversized": 1
    }  # fmt: skip
    assert [worker["instance"] for worker in status["workers"]] == ["worker-0"]
    metrics = samples(served.http.get("/metrics").text)
    assert metrics['control_plane_refused_messages_total{reason="malformed"}'] == 3


def test_a_goodbye_is_shown_with_its_exit_code(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker"))
    line.socket.send(encode(goodbye("drafter_worker", exit_code=1, reason="out of memory")))
    status = served.until(lambda status: status["workers"][0]["exit_code"] is not None)
    assert status["workers"][0]["condition"] == "failed"
    assert status["errors"][0]["text"] == "exit code 1: out of memory"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_control_plane_rebuilds_its_state(directory: Path, signal_number: int) -> None:
    identity = Identity("drafter_worker", "worker-0", RUN)
    state = ServiceState("running", "training", 7, worker_report())
    link = ControlLink(
        identity, directory / "control.sock", interval_seconds=0.05,
        describe=lambda: state, on_command=lambda command: None,
    )  # fmt: skip
    with link:
        for _ in range(2):
            served = Served(directory)
            token = served.token
            worker = served.until(lambda status: status["workers"])["workers"][0]
            assert worker["session"] == f"{link.session:016x}"
            assert worker["report"] == worker_report().model_dump(mode="json")
            served.close(signal_number)
    assert token == (directory / "control.token").read_text().strip()


def test_results_of_an_evaluator_that_has_ended_are_read_again(directory: Path) -> None:
    (directory / "evaluations").mkdir()
    result = evaluation().model_dump(mode="json") | {"text": "more than the record has"}
    (directory / "evaluations" / "one.json").write_text(json.dumps(result))
    (directory / "evaluations" / "two.json").write_text("{cut of")
    served = Served(directory)
    evaluations = served.status()["evaluations"]
    served.close()
    assert [entry["acceptance_length"] for entry in evaluations] == [2.5]


def test_a_port_in_use_is_a_config_error_that_names_it(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = refusal(directory, f"control_plane.port={port}")
    assert code == 2
    assert f"port {port} is in use" in text
    assert "control_plane.port" in text
    assert "Traceback" not in text


def test_a_second_control_plane_of_a_run_is_refused_and_the_first_serves_on(served: Served) -> None:
    code, text = refusal(served.directory)
    assert code == 2
    assert f"pid {served.process.pid}" in text
    assert "run.directory" in text
    assert served.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_command_without_the_token_is_refused_and_not_delivered(
    served: Served, line: Line, token: str | None
) -> None:
    line.ask(beat("drafter_worker"))
    assert served.post("/runs/stop", token).status_code == 401
    assert line.ask(beat("drafter_worker", number=2)).commands == ()


def test_a_command_with_the_token_rides_in_the_replies(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker"))
    answer = served.post("/runs/pause", served.token)
    assert answer.status_code == 202
    (command,) = line.ask(beat("drafter_worker", number=2)).commands
    assert (command.name, command.number) == ("pause", answer.json()["number"])
    assert answer.json()["num_recipients"] == 1
    assert served.post("/runs/explode", served.token).status_code == 422


def test_a_command_reaches_a_service_through_its_link_once(served: Served) -> None:
    commands: queue.Queue[Command] = queue.Queue()
    link = ControlLink(
        Identity("drafter_worker", "worker-0", RUN), served.directory / "control.sock",
        interval_seconds=0.05, describe=lambda: ServiceState("running"), on_command=commands.put,
    )  # fmt: skip
    with link:
        served.until(lambda status: status["workers"])
        for name in ("pause", "resume", "checkpoint"):
            served.post(f"/runs/{name}", served.token)
            assert commands.get(timeout=WATCHDOG_SECONDS).name == name
    assert commands.empty()


def test_the_token_is_its_owners_alone(served: Served) -> None:
    assert (served.directory / "control.token").stat().st_mode & 0o777 == 0o600
    assert len(served.token) >= 32


def test_the_page_and_its_files_come_from_here_and_may_load_nothing_else(served: Served) -> None:
    page = served.http.get("/").raise_for_status()
    places = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    for path in ["", *places]:
        assert not re.match(r"(\w+:)?//", path), path
        answer = served.http.get(f"/{path}").raise_for_status()
        if path != "status":
            assert answer.headers["content-security-policy"].startswith("default-src 'self';"), path
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
    assert {"static/main.js", "static/page.css"} < set(places)
    assert "MIT License" in served.http.get("/static/vendor/uplot/LICENSE").text
    assert served.http.get("/static/../app.py").status_code == 404
    assert served.http.get("/static/%2e%2e/app.py").status_code == 404


def test_an_open_event_stream_does_not_keep_it_from_ending(directory: Path) -> None:
    served = Served(directory)
    with served.http.stream("GET", "/events") as events:
        next(events.iter_lines())
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WATCHDOG_SECONDS) == 0
    served.close()


def test_a_port_that_nobody_set_is_another_where_it_is_taken() -> None:
    with contextlib.closing(listen(ControlPlaneTable(port=0))) as taken:
        port = taken.getsockname()[1]
        with contextlib.closing(listen(ControlPlaneTable(), last_port=port)) as other:
            assert other.getsockname()[1] != port
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            listen(ControlPlaneTable(port=port))
    with (  # of two runs at once
        contextlib.closing(listen(ControlPlaneTable())) as first,
        contextlib.closing(listen(ControlPlaneTable())) as second,
    ):
        assert first.getsockname() != second.getsockname()
    with contextlib.closing(listen(ControlPlaneTable(port=0), last_port=port)) as again:
        assert again.getsockname()[1] == port, "who knew the address finds the next one there"
