"""Runs that are killed and started again, and what they end with."""

import json
import signal
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.rings import wait_until
from tests.runs import END_SECONDS, Process, start, target_names

SERVICES = {"target": "services.target_server", "worker": "services.drafter_worker"}
FIGURES = (
    "loss", "acceptance_rate_at", "accepted_prefix_length", "num_blocks", "learning_rate",
    "gradient_norm", "trained_rows", "trained_tokens",
)  # fmt: skip


class Life:
    """The target and the worker of a run, again and again."""

    def __init__(self, config: Path, *settings: str, logs: Path | None = None) -> None:
        self.directory = config.parent / "run"
        self._folder = logs or self.directory / "logs"
        self._options = ["--config", config, *(p for one in settings for p in ("--set", one))]
        self._logs: list[Path] = []
        self.processes: dict[str, Process] = {}
        self.start(*SERVICES)

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*SERVICES)

    def start(self, *names: str) -> None:
        """Start services, again where they have ended."""
        for name in names:
            self._logs.append(self._folder / f"{len(self._logs)}.{name}.log")
            self.processes[name] = start(SERVICES[name], *self._options, log=self._logs[-1])

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGKILL)
        for name in names:
            self.processes[name].wait(60)

    def wait_for_lines(self, count: int) -> None:
        """Wait until the worker has written so many lines of metrics in all its lives, or has ended."""
        worker = self.processes["worker"]
        wait_until(
            lambda: len(read_lines(self.directory)) >= count or worker.poll() is not None,
            f"{count} lines of metrics",
        )
        assert worker.poll() in (None, 0), self.tails()

    def wait_for_end(self) -> None:
        for process in self.processes.values():
            assert process.wait(END_SECONDS) == 0, self.tails()

    def log(self) -> str:
        """Return everything that the services have written."""
        return "".join(log.read_text() for log in self._logs)

    def tails(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in self._logs)


def read_lines(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of metrics of the run's first worker."""
    path = run / "metrics" / "main-0.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def curve_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return the figures of each logged step, on the lineage of the weights that survived."""
    curve: dict[int, dict[str, Any]] = {}
    for line in read_lines(run):
        if line.get("is_resumed"):
            curve = {step: figures for step, figures in curve.items() if step <= line["step"]}
        elif "loss" in line:
            curve[line["step"]] = {name: line[name] for name in FIGURES}
    return curve


def newest_of(run: Path, worker: int = 0) -> Path:
    """Return a worker's newest checkpoint."""
    steps = (run / "checkpoints" / "main" / str(worker)).glob("step-*")
    return max(steps, key=lambda path: int(path.name.removeprefix("step-")))


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's trainer/state.json."""
    return dict(json.loads((checkpoint / "trainer" / "state.json").read_text()))


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return masters, moments and servable weights."""
    tensors = load_file(checkpoint / "trainer" / "optimizer.safetensors")
    return tensors | load_file(checkpoint / "model.safetensors")


def account_of(run: Path) -> dict[str, Any]:
    """Return the target's account of the group in its last life."""
    (name,) = target_names(1)
    return dict(json.loads((run / f"{name}.summary.json").read_text())["groups"]["main"])
