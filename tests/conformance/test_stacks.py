"""`ringdraft stacks`: a process that is stuck writes what its threads are at, heartbeats or not."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.lifecycle import FileLock
from tests.control_planes import WATCHDOG_SECONDS, Served
from tests.heartbeats import RUN
from tests.rings import wait_until

STUCK = """
import ctypes, sys
from pathlib import Path
from common.lifecycle import run_service
from common.telemetry.control_link import ControlLink, Identity, ServiceState

def wait_for_ever_here(call):
    print("stuck", flush=True)
    while True:  # a signal ends one sleep
        call(3600)

def main(stop):
    link = ControlLink(
        Identity("drafter_worker", "main-0", {run!r}), Path({path!r}), interval_seconds=0.05,
        describe=lambda: ServiceState("running"), on_command=print,
    )
    with link:
        # PyDLL keeps the interpreter's lock during the call, CDLL lets go of it.
        while not stop.wait(0.1) and link._number < 5:
            pass
        wait_for_ever_here(ctypes.{kind}(None).sleep)

sys.exit(run_service(main))
"""

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start_stuck(served: Served) -> Iterator[Start]:
    children = []

    def start(kind: str) -> subprocess.Popen[bytes]:
        script = STUCK.format(run=RUN, path=str(served.directory / "control.sock"), kind=kind)
        with log_of(served).open("wb") as log:
            child = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log)
        children.append(child)
        return child

    with FileLock(served.directory / "launcher.lock", "this test").acquire(""):
        yield start
    for child in children:
        child.kill()
        child.wait(WATCHDOG_SECONDS)


def log_of(served: Served) -> Path:
    return served.directory / "worker-0.log"


def stacks(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.launcher.cli", "stacks", *arguments]
    return subprocess.run(
        [*command, "--run", str(served.directory)],
        capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False,
    )  # fmt: skip


def has_stacks(served: Served) -> bool:
    return "wait_for_ever_here" in log_of(served).read_text()


def test_a_stuck_process_writes_its_stacks_when_the_control_plane_asks(
    served: Served, start_stuck: Start
) -> None:
    child = start_stuck("CDLL")
    served.until(lambda status: status["workers"])
    wait_until(lambda: "stuck" in log_of(served).read_text(), "it is stuck")
    done = stacks(served, "main-0")
    assert done.returncode == 0, done.stderr
    assert f"main-0 (pid {child.pid}, ok): its stacks come into {log_of(served)}" in done.stderr
    wait_until(lambda: has_stacks(served), "the stacks are in its log")
    text = log_of(served).read_text()
    assert text.count("most recent call first") >= 3, "all threads, the link's own as well"
    assert "Command(" not in text, "the service itself is not told"
    assert child.poll() is None


def test_a_process_that_holds_the_interpreter_s_lock_is_signalled(
    served: Served, start_stuck: Start
) -> None:
    child = start_stuck("PyDLL")
    served.until(lambda status: any(w["condition"] == "silent" for w in status["workers"]))
    done = stacks(served)  # whoever is stalled or silent
    assert done.returncode == 0, done.stderr
    assert f"main-0 (pid {child.pid}, silent)" in done.stderr
    wait_until(lambda: has_stacks(served), "the stacks are in its log")
    assert child.poll() is None


def test_a_silent_process_of_another_parent_is_left_alone(
    served: Served, start_stuck: Start
) -> None:
    start_stuck("PyDLL")
    served.until(lambda status: any(w["condition"] == "silent" for w in status["workers"]))
    (served.directory / "launcher.lock").rename(served.directory / "away")
    script = (
        "from common.lifecycle import FileLock; from pathlib import Path; "
        f"lock = FileLock(Path({str(served.directory / 'launcher.lock')!r}), 'other').acquire('');"
        "print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        done = stacks(served, "main-0")
        other.communicate("\n", timeout=WATCHDOG_SECONDS)
    assert done.returncode == 1
    assert "is no child of the launcher" in done.stderr
    assert not has_stacks(served)


def test_nobody_is_named_where_nobody_is_stuck(served: Served, start_stuck: Start) -> None:
    start_stuck("CDLL")
    served.until(lambda status: status["workers"])
    for arguments, message in (
        ((), "no service is stalled or silent; name one of: main-0"),
        (("main-7",), "no live service 'main-7'; there are: main-0"),
    ):
        done = stacks(served, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
