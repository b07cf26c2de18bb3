"""Processes that are forked from one which has loaded what they need: a start costs milliseconds."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
_LOADED = ["pytest", "tests.ring_hammer"]


def load_before_forks(module: str) -> None:
    """Have processes forked with a module in them. Call while modules are imported, not later."""
    if module not in _LOADED:
        _LOADED.append(module)
        FORKS.set_forkserver_preload(_LOADED)


FORKS.set_forkserver_preload(_LOADED)


class Fork:
    """A module that runs as `python -m` does, forked; what is asked of it is as in `Popen`."""

    def __init__(self, module: str, *arguments: str, environment: dict[str, str],
                 stdout: Path, stderr: Path) -> None:  # fmt: skip
        self.args = [module, *arguments]
        self._process = FORKS.Process(
            target=_run, args=(module, arguments, environment, stdout, stderr), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def end_with_the_test() -> None:
    """See to it that this process ends when the one that started it is gone."""
    threading.Thread(target=_watch_the_test, daemon=True).start()


def _watch_the_test() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(3)


def _run(
    module: str, arguments: tuple[str, ...], environment: dict[str, str], stdout: Path, stderr: Path
) -> None:
    """Be the module, with its output in files, until it ends or the test does."""
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    end_with_the_test()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
