"""Runs the services of a run: starts them, watches them, stops them in order.

    consumes    the ends of children, from the threads that reap them; the stop event
    produces    an `Outcome`; signals to the children
    waits for   the next end
    unblocked   by its timeout, a few times a second, when it also calls `on_tick`

A run is finished when its workers and targets have ended by themselves. A target that outlives
the last worker has nobody to serve and is asked to stop. A control plane or a quorum server
that ends first has failed, whatever its exit code. When the `with` block is left, nothing of the
run is left: not a process, not a segment.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from common.lifecycle import EXIT_CONFIG, EXIT_NO_PLACE, STACKS_SIGNAL
from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX
from services.launcher.config import LauncherTable
from services.launcher.process import Role, ServiceProcess, ServiceSpec

_TICK_SECONDS = 0.25
_KILL_SECONDS = 10.0
# A process that is not frozen has written them by then.
_STACKS_SECONDS = 1.0
_STOP_ORDER: tuple[tuple[Role, ...], ...] = (
    ("evaluator", "drafter_worker"),
    ("target_server",),
    ("quorum_server",),
    ("control_plane",),
)


@dataclass(frozen=True)
class Outcome:
    """How a run, or one service of it, came to its end."""

    kind: Literal["finished", "stopped", "failed"]
    failed: ServiceProcess | None = None
    lost: tuple[str, ...] = ()
    """Workers that failed while the run went on."""


class Supervisor:
    """Keeps the services of one run. Use as a context manager, in the main thread."""

    def __init__(
        self,
        run: str,
        directory: Path,
        table: LauncherTable,
        *,
        stop: threading.Event,
        say: Callable[[str], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._run = run
        self._logs = directory / "logs"
        self._table = table
        self._stop = stop
        self._say = say
        self._on_tick = on_tick
        self._exits: queue.Queue[ServiceProcess] = queue.Queue()
        self._processes: list[ServiceProcess] = []
        self._target_deadline: float | None = None
        self.lost: list[ServiceProcess] = []
        """Workers that failed while the run went on."""

    def run(
        self, specs: Sequence[ServiceSpec], on_tick: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Start the services and watch them until the run has an outcome.

        Args:
            on_tick: called a few times a second while they run.
        """
        for spec in specs:
            if not self._stop.is_set():
                self._start(spec)
        while True:
            if self._stop.is_set():
                return Outcome("stopped")
            on_tick()
            failed = self._wait_for_failure()
            if failed is not None:
                return Outcome("failed", failed)
            if self._is_finished():
                return Outcome("finished")

    def scale(self, count: int, numbered: Iterable[ServiceSpec]) -> None:
        """Have so many of these services: start the first ones that lack, ask the last ones to stop.

        One that is still on its way out is not counted.
        """
        specs = list(numbered)
        live = {p.spec.name: p for p in self._processes if p.is_running and not p.is_leaving}
        busy = {p.spec.name for p in self._processes if p.is_running}
        staying = [live[spec.name] for spec in specs if spec.name in live]
        for process in staying[count:]:
            self._say(f"{process.spec.name} is asked to leave")
            process.leave()
        absent = [spec for spec in specs if spec.name not in busy]
        for spec in absent[: max(0, count - len(staying))]:
            self._start(spec)

    def end_stuck(self, pid: int, why: str) -> None:
        """Kill the service of this pid, if it is one of these: its end is a failure like others."""
        for process in self._processes:
            if process.is_running and process.pids[-1] == pid:
                self._say(
                    f"{why}; it is killed, see {process.log_path} for its stacks if it wrote any"
                )
                process.send(STACKS_SIGNAL)
                self._stop.wait(_STACKS_SECONDS)
                process.kill()
                process.wait(_KILL_SECONDS)

    def run_once(self, spec: ServiceSpec) -> Outcome:
        """Run one more service beside the others until it ends."""
        self._start(spec)
        return self.wait_for(spec.name)

    def wait_for(self, name: str) -> Outcome:
        """Watch the services until the last one started under a name has ended."""
        process = [process for process in self._processes if process.spec.name == name][-1]
        while process.is_running:
            if self._stop.is_set():
                return Outcome("stopped")
            failed = self._wait_for_failure()
            if failed is not None:
                return Outcome("failed", failed)
        return Outcome("failed", process) if process.exit_code else Outcome("finished")

    def __enter__(self) -> "Supervisor":
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop workers, then targets, then the control plane, and remove what they left."""
        for roles in _STOP_ORDER:
            self._end([p for p in self._processes if p.spec.role in roles and p.is_running])
        pids = [pid for process in self._processes for pid in process.pids]
        num_bytes = remove_segments(self._run, pids)
        if num_bytes:
            self._say(f"removed segments of killed services: {num_bytes} bytes")

    def _start(self, spec: ServiceSpec) -> ServiceProcess:
        process = ServiceProcess(spec, self._logs, self._exits)
        process.start()
        self._processes.append(process)
        self._say(f"started {spec.name} (pid {process.pids[-1]}), log {process.log_path}")
        return process

    def _wait_for_failure(self) -> ServiceProcess | None:
        """Wait for one tick or the next end; return the service whose failure ends the run."""
        try:
            process = self._exits.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            self._on_tick()
            return None
        if not _has_failed(process):
            self._say(f"{process.spec.name} has ended")
            return None
        if self._may_restart(process):
            self._restart(process)
        elif self._may_go_on_without(process):
            self.lost.append(process)
            self._say(
                f"{process.spec.name} {process.describe_end()}; the others go on, see "
                f"{process.log_path}"
            )
        else:
            return process
        return None

    def _may_restart(self, process: ServiceProcess) -> bool:
        return (
            self._table.restart == "on-failure"
            and process.exit_code != EXIT_CONFIG  # the same config fails again
            and process.num_restarts < self._table.max_restarts
        )

    def _may_go_on_without(self, process: ServiceProcess) -> bool:
        # Who found no GPU has done nothing that the others would miss.
        is_extra = process.exit_code == EXIT_NO_PLACE
        return (
            (is_extra or self._table.on_worker_failure == "go_on")
            and process.spec.role == "drafter_worker"
            and process.exit_code != EXIT_CONFIG
            and any(not worker.exit_code for worker in self._of("drafter_worker"))
        )

    def _restart(self, process: ServiceProcess) -> None:
        delay = self._table.restart_delay_seconds * 2**process.num_restarts
        process.num_restarts += 1
        self._say(
            f"{process.spec.name} {process.describe_end()}; restart {process.num_restarts} of "
            f"{self._table.max_restarts} in {delay:g} s, see {process.log_path}"
        )
        if not self._stop.wait(delay):
            process.start()

    def _is_finished(self) -> bool:
        workers = self._of("drafter_worker")
        if any(process.is_running for process in workers):
            return False
        targets = [process for process in self._of("target_server") if process.is_running]
        if not targets:
            return True
        now = time.monotonic()
        if self._target_deadline is None:
            self._target_deadline = now + self._table.finish_seconds
        elif now >= self._target_deadline:
            self._say("all workers have ended; asking the target server to stop")
            self._end(targets)
        return False

    def _of(self, role: Role) -> list[ServiceProcess]:
        return [process for process in self._processes if process.spec.role == role]

    def _end(self, processes: list[ServiceProcess]) -> None:
        """Ask to stop, wait for the grace, kill the rest."""
        for process in processes:
            process.send(signal.SIGTERM)
        if self._wait_for(processes, self._table.grace_seconds):
            return
        for process in processes:
            if process.is_running:
                self._say(
                    f"{process.spec.name} did not stop in {self._table.grace_seconds:g} s and is "
                    f"killed; see {process.log_path}, or raise launcher.grace_seconds"
                )
                process.kill()
        self._wait_for(processes, _KILL_SECONDS)

    def _wait_for(self, processes: list[ServiceProcess], seconds: float) -> bool:
        """Wait until all have ended. Their ends stay in the queue, for `run` to judge."""
        deadline = time.monotonic() + seconds
        for process in processes:
            while not process.wait(_TICK_SECONDS):
                if time.monotonic() >= deadline:
                    return False
                self._on_tick()
        return True


def remove_segments(run: str, pids: Iterable[int]) -> int:
    """Remove the segments that ended children of this run left; return their bytes.

    Only segments named for children that this launcher has reaped: nobody else's, and no live one.
    """
    removed = 0
    for pid in pids:
        for path in SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}{run}-{pid}-*"):
            removed += path.stat().st_size
            path.unlink(missing_ok=True)
    return removed


def _has_failed(process: ServiceProcess) -> bool:
    return bool(process.exit_code) or process.spec.role in ("control_plane", "quorum_server")
