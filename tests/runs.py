"""Small whole runs for tests: a tiny random target, its data, one config file."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.ring.segment import SEGMENT_DIRECTORY
from tests.forks import Fork, load_before_forks
from tests.live_runs import Live
from tests.targets import make_tiny_target

Process = subprocess.Popen[bytes] | Fork
# A test's own time limit comes before it.
END_SECONDS = 280.0
# Whoever loads this module starts services; `ringdraft up` starts them as users do.
load_before_forks("tests.heavy_modules")
FORKED = {
    "services.control_plane",
    "services.drafter_worker",
    "services.drafter_worker.export",
    "services.target_server",
    "services.target_server.doctor",
    "services.target_server.inspect",
    "services.target_server.prepare",
    "services.target_server.regenerate",
    "tests.bad_server",
}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "the",
    "other",
    "dog",
]
CONFIG = """
[run]
name = "{name}"
directory = "{directory}/run"
num_threads = 1
[target]
model = "{directory}/target"
dtype = "float32"
num_aux_layers = 2
[data]
path = "{directory}/train.jsonl"
row_tokens = 128
[ring]
heartbeat_seconds = 0.1
session_timeout_seconds = 2.0
resume_wait_seconds = 0.2
[drafter]
num_layers = 1
block_size = 4
num_anchors = 16
loss_chunk_rows = 64
[optimizer]
learning_rate = 1e-2
[training]
log_steps = 2
checkpoint_steps = 10
[control_plane]
port = 0
[evaluation]
prompts = "{directory}/held_out.jsonl"
max_prompts = 3
max_new_tokens = 12
"""


def run_name(directory: Path) -> str:
    """Return a name that no run in another directory has."""
    return "test-" + hashlib.sha256(str(directory).encode()).hexdigest()[:8]


def segments_of(directory: Path) -> list[Path]:
    """Return the ring segments that the run in `directory` has."""
    return list(SEGMENT_DIRECTORY.glob(f"ringdraft-{run_name(directory)}-*"))


def make_run(directory: Path, num_conversations: int = 120) -> Path:
    """Write target, data and config into `directory`; return the config file."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tiny_target(directory / "target")
    chooser = random.Random(0)
    with (directory / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(num_conversations):
            start = chooser.randrange(4)
            answer = " ".join(WORDS[start : start + 9])
            messages = [
                {"role": "user", "content": WORDS[start]},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    with (directory / "held_out.jsonl").open("w", encoding="utf-8") as file:
        for word in WORDS[:3]:
            file.write(json.dumps({"messages": [{"role": "user", "content": word}]}) + "\n")
    config = directory / "run.toml"
    config.write_text(
        CONFIG.format(directory=directory, name=run_name(directory)), encoding="utf-8"
    )
    return config


def start(*arguments: str | Path, log: Path) -> Process:
    """Start `python -m ...`, one thread, its output in a file; what loads torch is forked."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    return _start(arguments, log, log)


def run_to_end(*arguments: str | Path) -> subprocess.CompletedProcess:
    """Run `python -m ...` to its end."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = _start(arguments, stdout, stderr)
        try:
            code = process.wait(END_SECONDS)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            process.args, code, stdout.read_text(), stderr.read_text()
        )


def train(config: Path, *settings: str, num_targets: int = 1) -> list[dict[str, Any]]:
    """Run targets and a worker to their end, without a launcher; return the targets' summaries."""
    run = config.parent / "run"
    logs = {name: run / "logs" / f"{name}.log" for name in ("worker", *target_names(num_targets))}
    options = [part for setting in settings for part in ("--set", setting)]
    processes = {
        name: start(
            "services.drafter_worker" if name == "worker" else "services.target_server",
            "--config", config, "--set", f"target.replicas={num_targets}", *options, log=log,
        )
        for name, log in logs.items()
    }  # fmt: skip
    try:
        for name, process in processes.items():
            assert process.wait(END_SECONDS) == 0, logs[name].read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert not segments_of(config.parent)
    return [
        json.loads((run / f"{name}.summary.json").read_text()) for name in target_names(num_targets)
    ]


def target_names(num_targets: int) -> list[str]:
    """Return the names that targets claim."""
    return [f"target-{number}" for number in range(num_targets)]


def _start(arguments: tuple[str | Path, ...], stdout: Path, stderr: Path) -> Process:
    module, *rest = map(str, arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if module in FORKED:
        return Fork(module, *rest, environment=environment, stdout=stdout, stderr=stderr)
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return subprocess.Popen(
            [sys.executable, "-m", module, *rest], env=environment, stdout=out, stderr=err
        )


@contextlib.contextmanager
def watched(run: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield a list that fills with the readings of a run's /status, from its start to its end."""
    seen: list[dict[str, Any]] = []
    stop = threading.Event()

    def watch() -> None:
        with contextlib.closing(Live(run)) as live:
            while not stop.wait(0.1):
                if (status := live.status()) is not None:
                    seen.append(status)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()
