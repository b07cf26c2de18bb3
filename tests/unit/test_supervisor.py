"""The launcher's supervisor over small real children: failures, stops, restarts, leftovers."""

import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError, RingdraftError
from common.lifecycle import EXIT_NO_PLACE
from common.ring.segment import SEGMENT_DIRECTORY
from services.launcher.config import LauncherTable
from services.launcher.dry_run import check
from services.launcher.process import Role, ServiceProcess, ServiceSpec
from services.launcher.supervisor import Outcome, Supervisor, remove_segments

WATCHDOG_SECONDS = 30
RUN = "supervisor-test"

SERVE = """
import sys, threading
from common.lifecycle import run_service

def main(stop):
    print("serving", flush=True)
    while not stop.wait(0.5):
        pass
    print("stopped", flush=True)

sys.exit(run_service(main))
"""
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    "signal.pause()"
)
END = "pass"
FAIL = "import sys; [print('line', n) for n in range(30)]; sys.exit(3)"
REFUSE = "import sys; print('no such key', file=sys.stderr); sys.exit(2)"
# Fails at its first start and serves at its second.
FAIL_ONCE = """
import pathlib, sys
mark = pathlib.Path({mark!r})
if not mark.exists():
    mark.touch()
    sys.exit(1)
"""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


def supervise(directory: Path, stop: threading.Event, said: list[str], **settings) -> Supervisor:
    values = {"grace_seconds": 20.0, "finish_seconds": 0.2, "restart_delay_seconds": 0.0} | settings
    return Supervisor(RUN, directory, LauncherTable.model_validate(values), stop=stop,
                      say=said.append, on_tick=lambda: None)  # fmt: skip


def spec(role: Role, script: str, name: str = "") -> ServiceSpec:
    return ServiceSpec(name or role, role, (sys.executable, "-c", script))


def run_to_end(supervisor: Supervisor, *specs: ServiceSpec) -> Outcome:
    with supervisor:
        return supervisor.run(specs)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def processes(supervisor: Supervisor) -> dict[str, ServiceProcess]:
    return {process.spec.name: process for process in supervisor._processes}


def wait_for_line(process: ServiceProcess, line: str) -> None:
    never = threading.Event()
    for _ in range(WATCHDOG_SECONDS * 20):
        if process.log_path.exists() and line in process.tail():
            return
        never.wait(0.05)
    raise AssertionError(f"{process.spec.name} never wrote {line!r}")


def test_a_run_is_finished_when_workers_and_target_end(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said)
    with supervisor:
        control_plane = supervisor._start(spec("control_plane", SERVE))
        wait_for_line(control_plane, "serving")
        outcome = supervisor.run([spec("target_server", END), spec("drafter_worker", END)])
    assert outcome == Outcome("finished")
    assert (control_plane.exit_code, control_plane.tail()) == (0, ["serving", "stopped"])


def test_a_target_that_outlives_the_last_worker_is_asked_to_stop(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said, finish_seconds=2.0)
    outcome = run_to_end(supervisor, spec("target_server", SERVE), spec("drafter_worker", END))
    assert outcome == Outcome("finished")
    assert processes(supervisor)["target_server"].tail() == ["serving", "stopped"]


def test_a_failing_child_stops_the_others_and_its_last_lines_are_kept(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said)
    outcome = run_to_end(supervisor, spec("control_plane", SERVE), spec("target_server", SERVE),
                         spec("drafter_worker", FAIL))  # fmt: skip
    assert (outcome.kind, outcome.failed.spec.name, outcome.failed.exit_code) == (
        "failed", "drafter_worker", 3
    )  # fmt: skip
    assert outcome.failed.tail() == [f"line {number}" for number in range(10, 30)]
    assert outcome.failed.describe_end() == "ended with exit code 3"
    assert not any(is_alive(pid) for p in processes(supervisor).values() for pid in p.pids)


def test_a_killed_child_is_named_with_its_signal(tmp_path, stop, said) -> None:
    kill_me = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    outcome = run_to_end(supervise(tmp_path, stop, said), spec("drafter_worker", kill_me))
    assert outcome.failed.describe_end() == "was killed by SIGKILL; was memory short?"


@pytest.mark.parametrize("script", [END, FAIL])
@pytest.mark.parametrize("role", ["control_plane", "quorum_server"])
def test_a_server_of_the_run_that_ends_first_has_failed(tmp_path, stop, said, role, script) -> None:
    outcome = run_to_end(supervise(tmp_path, stop, said), spec(role, script),
                         spec("drafter_worker", SERVE))  # fmt: skip
    assert (outcome.kind, outcome.failed.spec.name) == ("failed", role)


def test_services_stop_in_the_order_worker_target_control_plane(tmp_path, stop, said) -> None:
    stamp = SERVE.replace('print("stopped", flush=True)', "import time; print(time.monotonic_ns())")
    supervisor = supervise(tmp_path, stop, said)
    roles = ("control_plane", "target_server", "drafter_worker")
    with supervisor:
        for role in roles:
            supervisor._start(spec(role, stamp))
        for role in roles:
            wait_for_line(processes(supervisor)[role], "serving")
        stop.set()
        assert supervisor.run([]) == Outcome("stopped")
    ended = {role: int(processes(supervisor)[role].tail(1)[0]) for role in roles}
    assert ended["drafter_worker"] < ended["target_server"] < ended["control_plane"]


def test_a_child_that_does_not_stop_is_killed_after_its_grace(tmp_path, stop, said) -> None:
    stop.set()
    supervisor = supervise(tmp_path, stop, said, grace_seconds=0.5)
    with supervisor:
        deaf = supervisor._start(spec("drafter_worker", DEAF))
        wait_for_line(deaf, "up")
    assert deaf.exit_code == -signal.SIGKILL
    assert any("launcher.grace_seconds" in line for line in said)


def test_grandchildren_do_not_outlive_their_service(tmp_path, stop, said) -> None:
    parent = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid, flush=True)"
    supervisor = supervise(tmp_path, stop, said)
    assert run_to_end(supervisor, spec("drafter_worker", parent)) == Outcome("finished")
    grandchild = int(processes(supervisor)["drafter_worker"].tail()[0])
    never = threading.Event()
    for _ in range(WATCHDOG_SECONDS * 20):  # it has been killed; the kernel takes its time
        if not is_running(grandchild):
            return
        never.wait(0.05)
    raise AssertionError(f"grandchild {grandchild} is alive")


def is_running(pid: int) -> bool:
    """Say whether a process runs; one that is dead and not yet reaped by init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_on_failure_restarts_the_failed_service_alone(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said, restart="on-failure")
    script = FAIL_ONCE.format(mark=str(tmp_path / "mark"))
    outcome = run_to_end(supervisor, spec("target_server", END), spec("drafter_worker", script))
    assert outcome == Outcome("finished")
    assert len(processes(supervisor)["drafter_worker"].pids) == 2
    assert any("restart 1 of 3" in line for line in said)


def test_restarts_end_with_the_budget(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said, restart="on-failure", max_restarts=2)
    outcome = run_to_end(supervisor, spec("drafter_worker", FAIL))
    assert outcome.kind == "failed"
    assert len(outcome.failed.pids) == 3


def test_a_config_error_is_not_tried_again(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said, restart="on-failure")
    outcome = run_to_end(supervisor, spec("drafter_worker", REFUSE))
    assert (outcome.failed.exit_code, len(outcome.failed.pids)) == (2, 1)


def test_one_more_service_runs_beside_the_others(tmp_path, stop, said) -> None:
    supervisor = supervise(tmp_path, stop, said)
    with supervisor:
        assert (
            supervisor.run([spec("control_plane", SERVE), spec("drafter_worker", END)]).kind
            == "finished"
        )
        assert supervisor.run_once(spec("evaluator", END)) == Outcome("finished")
        failed = supervisor.run_once(spec("evaluator", FAIL, "again"))
        assert (failed.kind, failed.failed.spec.name) == ("failed", "again")
        assert processes(supervisor)["control_plane"].is_running


@pytest.fixture
def segments() -> Iterator[list[Path]]:
    made: list[Path] = []
    yield made
    for path in made:
        path.unlink(missing_ok=True)


def test_segments_of_ended_children_are_removed_and_others_left(segments) -> None:
    own, other_pid, other_run = (
        SEGMENT_DIRECTORY / f"ringdraft-{name}-0"
        for name in (f"{RUN}-4000001", f"{RUN}-4000002", f"{RUN}x-4000001")
    )
    for path in (own, other_pid, other_run):
        path.write_bytes(b"12345")
        segments.append(path)
    assert remove_segments(RUN, [4000001]) == 5
    assert [path.exists() for path in segments] == [False, True, True]


def test_nothing_is_left_in_shared_memory_by_a_killed_target(
    tmp_path, stop, said, segments
) -> None:
    crash = (
        "import os, pathlib, signal; pathlib.Path(f'/dev/shm/ringdraft-"
        + RUN
        + "-{os.getpid()}-0').write_bytes(b'1'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    supervisor = supervise(tmp_path, stop, said)
    outcome = run_to_end(supervisor, spec("target_server", crash), spec("drafter_worker", SERVE))
    assert outcome.kind == "failed"
    assert list(SEGMENT_DIRECTORY.glob(f"ringdraft-{RUN}-*")) == []


def test_a_dry_run_gives_each_services_config() -> None:
    accept = "import json, sys; assert sys.argv[-1] == '--dry-run'; print(json.dumps({'a': 1}))"
    assert check([spec("target_server", accept)]) == {"target_server": {"a": 1}}


def test_a_refused_dry_run_is_a_config_error_with_what_each_service_said() -> None:
    accept = "print('{}')"
    with pytest.raises(ConfigError, match="target_server, drafter_worker: no such key"):
        check([spec("target_server", REFUSE), spec("control_plane", accept),
               spec("drafter_worker", REFUSE + " ")])  # fmt: skip


def test_a_dry_run_that_crashes_is_no_config_error() -> None:
    with pytest.raises(RingdraftError, match="boom") as caught:
        check([spec("target_server", "raise ValueError('boom')")])
    assert not isinstance(caught.value, ConfigError)


LAUNCHER = """
import sys
from pathlib import Path
from common.lifecycle import run_service
from services.launcher.config import LauncherTable
from services.launcher.process import ServiceSpec
from services.launcher.supervisor import Supervisor

SERVE = {serve!r}

def main(stop):
    roles = ("control_plane", "target_server", "drafter_worker")
    specs = [ServiceSpec(role, role, (sys.executable, "-c", SERVE)) for role in roles]
    supervisor = Supervisor({run!r}, Path({directory!r}), LauncherTable(), stop=stop,
                            say=lambda text: print(text, flush=True), on_tick=lambda: None)
    with supervisor:
        print(supervisor.run(specs).kind, flush=True)

sys.exit(run_service(main))
"""


def start_launcher(directory: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a launcher of three services; return it and their pids once all serve."""
    script = LAUNCHER.format(serve=SERVE, run=RUN, directory=str(directory))
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    lines = [launcher.stdout.readline() for _ in range(3)]
    for role in ("control_plane", "target_server", "drafter_worker"):
        known = ServiceProcess(spec(role, SERVE), directory / "logs", queue.Queue())
        wait_for_line(known, "serving")
    return launcher, [int(line.split("pid ")[1].split(")")[0]) for line in lines]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_cleanly(tmp_path, number) -> None:
    launcher, pids = start_launcher(tmp_path)
    launcher.send_signal(number)
    try:
        out, _ = launcher.communicate(timeout=WATCHDOG_SECONDS)
    finally:
        launcher.kill()
    assert launcher.returncode == 0
    assert out.splitlines()[-1] == "stopped"
    assert not any(is_running(pid) for pid in pids)
    for role in ("control_plane", "target_server", "drafter_worker"):
        assert (tmp_path / "logs" / f"{role}.log").read_text() == "serving\nstopped\n"


def test_services_stop_when_the_launcher_is_killed(tmp_path) -> None:
    launcher, pids = start_launcher(tmp_path)
    watched = [os.pidfd_open(pid) for pid in pids]
    launcher.kill()
    launcher.communicate(timeout=WATCHDOG_SECONDS)
    for descriptor in watched:
        assert select.select([descriptor], [], [], WATCHDOG_SECONDS)[0], "a service outlived it"
        os.close(descriptor)
    assert (tmp_path / "logs" / "target_server.log").read_text() == "serving\nstopped\n"


def test_workers_go_on_without_one_that_failed_where_that_is_asked_for(
    tmp_path, stop, said
) -> None:
    workers = [spec("drafter_worker", script, name) for script, name in ((FAIL, "a"), (END, "b"))]
    supervisor = supervise(tmp_path, stop, said, on_worker_failure="go_on")
    assert run_to_end(supervisor, *workers) == Outcome("finished")
    assert [process.spec.name for process in supervisor.lost] == ["a"]
    assert any("a ended with exit code 3; the others go on" in line for line in said)
    outcome = run_to_end(supervise(tmp_path, stop, said), *workers)
    assert outcome.failed is not None
    assert outcome.failed.spec.name == "a"


def test_a_worker_that_no_gpu_has_room_for_is_no_reason_to_stop(tmp_path, stop, said) -> None:
    none = f"import sys; sys.exit({EXIT_NO_PLACE})"
    extra, other = spec("drafter_worker", none, "a"), spec("drafter_worker", END, "b")
    supervisor = supervise(tmp_path, stop, said)
    assert run_to_end(supervisor, extra, other) == Outcome("finished")
    assert [process.spec.name for process in supervisor.lost] == ["a"]
    assert run_to_end(supervise(tmp_path, stop, said), extra).kind == "failed"
    target = spec("target_server", none, "t")
    assert run_to_end(supervise(tmp_path, stop, said), target, other).kind == "failed"


@pytest.mark.parametrize(
    "specs",
    [
        [("drafter_worker", FAIL, "a"), ("drafter_worker", FAIL, "b")],
        [("drafter_worker", REFUSE, "a"), ("drafter_worker", SERVE, "b")],
        [("target_server", FAIL, "t"), ("drafter_worker", SERVE, "b")],
    ],
)
def test_a_run_does_not_go_on_without_any_worker_its_target_or_a_good_config(
    tmp_path, stop, said, specs: list
) -> None:
    supervisor = supervise(tmp_path, stop, said, on_worker_failure="go_on")
    outcome = run_to_end(supervisor, *(spec(role, script, name) for role, script, name in specs))
    assert outcome.kind == "failed"


def workers(script: str = SERVE) -> list[ServiceSpec]:
    return [spec("drafter_worker", script, f"worker-{number}") for number in range(4)]


def test_scaling_starts_the_first_that_lack_and_sends_the_last_away(tmp_path, stop, said) -> None:
    wanted = iter((3, 1, 2))
    seen: list[list[str]] = []

    def running() -> list[str]:
        found = [p for p in supervisor._processes if p.is_running and not p.is_leaving]
        return sorted(process.spec.name for process in found)

    def on_tick() -> None:
        count = next(wanted, 0)
        if count == 0:
            stop.set()
            return
        supervisor.scale(count, workers())
        for process in supervisor._processes:
            if process.is_leaving:
                assert process.wait(WATCHDOG_SECONDS)
            elif process.is_running:
                wait_for_line(process, "serving")
        seen.append(running())

    supervisor = supervise(tmp_path, stop, said)
    with supervisor:
        outcome = supervisor.run(workers()[:1], on_tick=on_tick)
    assert outcome == Outcome("stopped")
    every = ["worker-0", "worker-1", "worker-2"]
    assert seen == [every, every[:1], every[:2]]
    assert "worker-2 is asked to leave" in said
    assert [p.exit_code for p in supervisor._processes] == [0, 0, 0, 0]


def test_one_on_its_way_out_makes_no_room_under_its_name(tmp_path, stop, said) -> None:
    with supervise(tmp_path, stop, said, grace_seconds=0.5) as supervisor:
        supervisor.scale(2, workers(DEAF))
        for process in processes(supervisor).values():
            wait_for_line(process, "up")
        supervisor.scale(1, workers(DEAF))
        supervisor.scale(2, workers(DEAF))
        names = [process.spec.name for process in supervisor._processes]
    assert names == ["worker-0", "worker-1", "worker-2"]
