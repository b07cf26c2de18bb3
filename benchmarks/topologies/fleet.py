"""The processes of a run, each on a GPU of its own choosing, and what they do in a time.

Services are started one by one, as on machines without a launcher, with `CUDA_VISIBLE_DEVICES` in their
environment; figures come from the control plane's /status. On a machine with fewer GPUs than a topology
has they share those that there are, and on one without they share its cores: that shows that the script
works, and says nothing of its speed.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch

from services.launcher.progress import fetch_status

Status = dict[str, Any]
Naming = Literal["index", "uuid"]
START_SECONDS = 420.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine, by UUID; none on a CPU."""

    gpus: tuple[str, ...]

    @classmethod
    def find(cls) -> "Machine":
        """Ask the driver, without touching CUDA in this process."""
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
            listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            return cls(tuple(listed.split()))
        return cls(())

    @property
    def device(self) -> str:
        """Where models run."""
        return "cuda" if self.gpus else "cpu"

    def form(self, wanted: int) -> str:
        """Return the form in which a topology of `wanted` GPUs runs here."""
        if not self.gpus:
            return "cpu"
        return (
            f"{wanted} GPUs" if len(self.gpus) >= wanted else f"{len(self.gpus)} of {wanted} GPUs"
        )

    def prefix(self, gpu: int, naming: Naming = "uuid") -> tuple[str, ...]:
        """Return what a command begins with that is to use GPU number `gpu` and see no other."""
        if not self.gpus:
            return ("env", "OMP_NUM_THREADS=1")
        index = gpu % len(self.gpus)
        return ("env", f"CUDA_VISIBLE_DEVICES={self.gpus[index] if naming == 'uuid' else index}")

    def memory(self, gpu: int) -> int:
        """Return the bytes in use on a GPU, by all of its processes."""
        query = ["nvidia-smi", f"--id={self.gpus[gpu % len(self.gpus)]}", "--query-gpu=memory.used"]
        run = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)  # fmt: skip
        return int(run.stdout) << 20


class Fleet:
    """A run's processes by name. Use as a context manager."""

    def __init__(self, directory: Path, config: Path, machine: Machine) -> None:
        """`directory` is the run's, as the config says."""
        self.directory = directory
        self._config = config
        self._machine = machine
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gpus: dict[str, int] = {}
        self._never = threading.Event()

    def __enter__(self) -> "Fleet":
        self.start("control_plane", "control-plane")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()

    def start(self, role: str, name: str, gpu: int = 0, naming: Naming = "uuid",
              settings: Sequence[str] = ()) -> None:  # fmt: skip
        """Start a service on a GPU, its output in a log of its name."""
        log = self.directory / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        options = [part for setting in settings for part in ("--set", setting)]
        with log.open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [*self._machine.prefix(gpu, naming), sys.executable, "-m", f"services.{role}", "--config", str(self._config), *options],
                stdout=output, stderr=output,
            )  # fmt: skip
        self._gpus[name] = gpu

    def kill(self, name: str) -> None:
        """End a process at once."""
        self._processes[name].kill()
        self._processes.pop(name).wait()

    def pid(self, name: str) -> int:
        """Return a process's id."""
        return self._processes[name].pid

    def log(self, name: str) -> str:
        """Return what a service has written."""
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    def status(self) -> Status:
        """Return /status; empty while the control plane does not answer."""
        return fetch_status(self.directory) or {}

    def wait_until(self, holds: Callable[[Status], bool], what: str, seconds: float = START_SECONDS) -> Status:  # fmt: skip
        """Wait for a status; end the script with the logs where a process ends first."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            if status and holds(status):
                return status
            ended = [
                name for name, process in self._processes.items() if process.poll() is not None
            ]
            if ended or time.monotonic() > deadline:
                tails = "\n".join(
                    f"== {name}\n{self.log(name)[-2500:]}" for name in ended or self._processes
                )
                raise SystemExit(f"not within {seconds:.0f} s: {what}; ended: {ended}\n{tails}")
            self._never.wait(_LOOK_SECONDS)

    def wait_for_steps(self, num_workers: int, steps: int) -> Status:
        """Wait until so many workers have made `steps` steps each in this life."""

        def have_stepped(status: Status) -> bool:
            reports = [worker["report"] for worker in live(status["workers"])]
            return (
                sum(report["trained_rows"] > 0 and report["step"] >= steps for report in reports)
                >= num_workers
            )

        return self.wait_until(have_stepped, f"{num_workers} workers at step {steps}")

    def measure(self, seconds: float) -> dict[str, Any]:
        """Return what every process does in the next `seconds`."""
        first, memory = self._reading(), self._memory()
        self._never.wait(seconds)
        last, later = self._reading(), self._memory()
        return {
            **compare(first, last),
            "memory_bytes": later,
            "memory_change_bytes": {name: later[name] - memory[name] for name in later},
        }

    def _reading(self) -> Status:
        return self.wait_until(lambda status: bool(status["workers"]), "a status", 30)

    def _memory(self) -> dict[str, int]:
        if self._machine.gpus:
            return {name: self._machine.memory(gpu) for name, gpu in self._gpus.items()
                    if name in self._processes and name != "control-plane"}  # fmt: skip
        return {name: _resident(process.pid) for name, process in self._processes.items()}  # fmt: skip


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live(instances: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return instances that report and are well."""
    return [one for one in instances if one["report"] and one["condition"] == "ok"]


def compare(first: Status, last: Status) -> dict[str, Any]:
    """Return rates and shares between two readings, each instance's by its own heartbeats.

    `pipeline_efficiency` is the part of the time in which the slower side, whichever that is, does not wait
    for the other one. `busy_share` is the rows trained times the median step, over the time.
    """
    workers, targets = {}, {}
    for before, after in _pairs(first["workers"], last["workers"]):
        seconds, old, new = _seconds(first, last, before, after), before["report"], after["report"]
        rows, tokens = (new[key] - old[key] for key in ("trained_rows", "trained_tokens"))
        workers[after["instance"]] = {
            "gpu_uuid": new["gpu_uuid"],
            "tokens_per_second": tokens / seconds,
            "starved_share": (new["starved_seconds"] - old["starved_seconds"]) / seconds,
            "sync_share": (new["sync_seconds"] - old["sync_seconds"]) / seconds,
            "step_seconds": new["step_seconds"],
            "busy_share": rows * new["step_seconds"] / seconds,
            "recompiles": new["recompiles"] - old["recompiles"],
            "loss": new["loss"],
        }
    for before, after in _pairs(first["target"]["instances"], last["target"]["instances"]):
        seconds, old, new = _seconds(first, last, before, after), before["report"], after["report"]
        targets[after["instance"]] = {
            "tokens_per_second": (new["captured_tokens"] - old["captured_tokens"]) / seconds,
            "blocked_share": (new["blocked_seconds"] - old["blocked_seconds"]) / seconds,
        }
    fed = [1 - worker["starved_share"] for worker in workers.values()]
    unblocked = [1 - target["blocked_share"] for target in targets.values()]
    return {
        "seconds": round(last["time"] - first["time"], 1),
        "trained_tokens_per_second": sum(
            worker["tokens_per_second"] for worker in workers.values()
        ),
        "pipeline_efficiency": max(map(statistics.mean, (fed, unblocked))),
        "transport": last["transport"],
        "workers": workers,
        "targets": targets,
    }


def _pairs(first: Sequence[Any], last: Sequence[Any]) -> list[tuple[Any, Any]]:
    known = {one["session"]: one for one in live(first)}
    return [(known[one["session"]], one) for one in live(last) if one["session"] in known]


def _seconds(first: Status, last: Status, before: Any, after: Any) -> float:
    """Return the time between the heartbeats that two readings show of an instance."""
    return float(
        (last["time"] - after["heartbeat_age_seconds"])
        - (first["time"] - before["heartbeat_age_seconds"])
    )


def write_result(path: Path, title: str, result: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write a script's figures as JSON, and as a short report beside it; print the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    where = f"{result['form']}, torch {torch.__version__}, {date.today()}; figures in {path.name}."
    report = "\n".join((f"# {title}", "", where, "", *lines, ""))
    path.with_suffix(".md").write_text(report, encoding="utf-8")
    print(report)
