"""One service as a child process: its log, its signals, its end.

A child leads a process group of its own, so that Ctrl-C reaches the launcher alone and nothing
of the group outlives the child; it gets SIGTERM if the launcher dies.
"""

import os
import queue
import signal
import subprocess
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from common.lifecycle import die_with_parent

Role = Literal["control_plane", "quorum_server", "target_server", "drafter_worker", "evaluator"]

TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class ServiceSpec:
    """What to start."""

    name: str
    role: Role
    command: tuple[str, ...]


class ServiceProcess:
    """A child from its start to its end; started again, it is the same object."""

    def __init__(
        self, spec: ServiceSpec, log_directory: Path, exits: "queue.Queue[ServiceProcess]"
    ) -> None:
        """`exits` is told when the child has ended."""
        self.spec = spec
        self.log_path = log_directory / f"{spec.name}.log"
        self.num_restarts = 0
        self.is_leaving = False
        """It was asked to stop while the run goes on."""
        self.pids: list[int] = []
        self.exit_code: int | None = None
        self._is_killed = False
        self._exits = exits
        self._log_start = 0
        self._ended = threading.Event()
        # Held while the child is reaped, so that no signal goes to a pid that is free again.
        self._reaping = threading.Lock()

    def start(self) -> None:
        """Start the child. Call in the main thread: the kernel ties the child to that thread."""
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            child = subprocess.Popen(
                self.spec.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                process_group=0, preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        self.exit_code, self._is_killed = None, False
        self._ended.clear()
        self.pids.append(child.pid)
        threading.Thread(target=self._reap, args=(child,), name=self.spec.name, daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return bool(self.pids) and self.exit_code is None

    def wait(self, seconds: float) -> bool:
        """Wait for the child's end; return whether it has ended."""
        return not self.is_running or self._ended.wait(seconds)

    def send(self, signal_number: int) -> None:
        """Signal the child; once it has ended, do nothing."""
        with self._reaping:
            if self.is_running:
                os.kill(self.pids[-1], signal_number)

    def leave(self) -> None:
        """Ask the child to stop while the run goes on."""
        self.is_leaving = True
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and all of its group."""
        with self._reaping:
            if self.is_running:
                self._is_killed = True
                _kill_group(self.pids[-1])

    def describe_end(self) -> str:
        """Say how it ended."""
        code = self.exit_code or 0
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        is_others = code == -signal.SIGKILL and not self._is_killed
        hint = "; was memory short?" if is_others else ""
        return f"was killed by {name}{hint}"

    def tail(self, num_lines: int = TAIL_LINES) -> list[str]:
        """Return the last lines that this life of the child wrote."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]

    def _reap(self, child: "subprocess.Popen[bytes]") -> None:
        # The dead child keeps its pid until `wait`, so the group still is its own.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            _kill_group(child.pid)
            self.exit_code = child.wait()
        self._ended.set()
        self._exits.put(self)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # the child had not yet come to lead its group, or all are gone
        return
