"""Start and end of processes: signals, exit codes, death with the parent, locks."""

import gc
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.lifecycle import (
    FileLock,
    heavy_imports,
    lock_holder,
    process_age_seconds,
    write_atomically,
)

WATCHDOG_SECONDS = 30
_TICK = 1 / os.sysconf("SC_CLK_TCK")

WAITER = """
import sys, threading
from common.lifecycle import run_service

def main(stop):
    print("ready", flush=True)
    while not stop.wait(0.5):
        pass
    print("stopping", flush=True)
    {after}

sys.exit(run_service(main))
"""

RAISER = """
import sys
from common.errors import ConfigError, SegmentError
from common.lifecycle import run_service

def main(stop):
    raise {error}

sys.exit(run_service(main))
"""

PARENT = """
import os, subprocess, sys
from common.lifecycle import die_with_parent
parent = os.getpid()
child = subprocess.Popen(["cat", "/proc/self/stat", "-"], stdout=sys.stdout, stdin=subprocess.PIPE,
                         preexec_fn=lambda: die_with_parent(parent))
child.wait()
"""


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=WATCHDOG_SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_sets_the_stop_event_and_the_exit_is_clean(number: int) -> None:
    process = start(WAITER.format(after="return 0"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, out, _ = finish(process)
    assert (code, out) == (0, "stopping\n")


def test_a_second_signal_ends_the_process() -> None:
    process = start(WAITER.format(after="threading.Event().wait(3600)"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    ended = os.pidfd_open(process.pid)
    for _ in range(WATCHDOG_SECONDS):  # those of the first half second count as the first
        process.send_signal(signal.SIGTERM)
        if select.select([ended], [], [], 1)[0]:
            break
    os.close(ended)
    code, _, _ = finish(process)
    assert code == 128 + signal.SIGTERM


def test_a_burst_of_signals_is_one_request() -> None:
    process = start(WAITER.format(after="return 0"))
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    code, out, _ = finish(process)
    assert (code, out) == (0, "stopping\n")


def test_a_signal_has_the_stacks_written_and_nothing_ended() -> None:
    process = start(WAITER.format(after="return 0"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    for line in process.stderr:
        if " in main" in line:
            break
    else:
        raise AssertionError("it has ended")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[:2] == (0, "stopping\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [("ConfigError('no such key')", 2), ("SegmentError('no room')", 1), ("ValueError('odd')", 1)],
)
def test_an_error_is_logged_once_and_becomes_the_exit_code(error: str, code: int) -> None:
    got, _, err = finish(start(RAISER.format(error=error)))
    assert got == code
    message = error.split("'")[1]
    lines = err.splitlines()
    assert message in lines[0]
    assert ("Traceback" in err) == (code == 1)


def test_a_config_error_shows_no_traceback() -> None:
    _, _, err = finish(start(RAISER.format(error="ConfigError('use another port')")))
    assert err == "use another port\n"


def test_a_child_dies_with_its_parent() -> None:
    parent = start(PARENT)
    child_pid = int(parent.stdout.readline().split()[0])
    child = os.pidfd_open(child_pid)
    parent.kill()
    ready, _, _ = select.select([child], [], [], WATCHDOG_SECONDS)
    os.close(child)
    finish(parent)
    assert ready, f"child {child_pid} outlived its parent"


def test_heavy_imports_look_for_no_garbage_and_leave_the_collector_on() -> None:
    imports = heavy_imports()
    imports.__enter__()
    assert not gc.isenabled()
    error = ImportError("no module")
    assert not imports.__exit__(ImportError, error, None)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_taken_lock_names_its_holder_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with FileLock(path, "launcher of run 'a'").acquire(remedy="stop it"):
        assert lock_holder(path) == os.getpid()
        with pytest.raises(ConfigError) as caught:
            FileLock(path, "other").acquire(remedy="choose another run.directory")
    text = str(caught.value)
    assert "launcher of run 'a'" in text
    assert str(os.getpid()) in text
    assert "choose another run.directory" in text


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = FileLock(path, "first").acquire(remedy="")
    lock.release()
    lock.release()
    assert lock_holder(path) is None
    FileLock(path, "second").acquire(remedy="").release()


def test_a_dead_holder_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    script = f"""
from pathlib import Path
from common.lifecycle import FileLock
lock = FileLock(Path({str(path)!r}), "dead").acquire(remedy="")
print("held", flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout.readline() == "held\n"
    assert lock_holder(path) == process.pid
    process.kill()
    finish_code = process.wait(WATCHDOG_SECONDS)
    process.stdin.close()
    process.stdout.close()
    assert finish_code == -signal.SIGKILL
    assert lock_holder(path) is None


def test_an_atomic_write_replaces_the_whole_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "control.token"
    write_atomically(path, "first, longer", mode=0o600)
    write_atomically(path, "second", mode=0o600)
    assert path.read_text() == "second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["control.token"]


def test_a_process_s_age_counts_from_its_start_and_not_from_its_first_line() -> None:
    code = """
import time
began_at = time.monotonic()
import typer, pydantic
from common.lifecycle import process_age_seconds
print(process_age_seconds(), time.monotonic() - began_at)
"""
    began_at = time.monotonic()
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    elapsed = time.monotonic() - began_at
    age, since_first_line = map(float, output.split())
    assert since_first_line < age < elapsed + _TICK
    before = process_age_seconds()
    time.sleep(0.05)
    assert process_age_seconds() - before >= 0.05
