"""What a run directory says of itself: README.md, for people, and run.json, one entry for each start."""

import json
import platform
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.lifecycle import write_atomically

RUN_RECORD = "run.json"
README = "README.md"
_PACKAGES = ("ringdraft", "torch", "transformers", "pyzmq", "safetensors")
_GIT_SECONDS = 5
_FILES = {
    "run.json": "each start: when, command line, versions, commit of the source",
    "config.json": "what every service made of the config at the last start",
    "launcher.json": "who runs it, while it runs",
    "scale.json": "a request of `ringdraft scale`, until the launcher has taken it",
    "data.json": "the tags of the data, by the numbers that rows carry",
    "held_out.safetensors": "the target's answers to the prompts of [held_out]",
    "metrics/": "curves, as JSON lines: see below",
    "tensorboard/": "the same for TensorBoard, where training.trackers names it",
    "wandb/": "the same for wandb, where training.trackers names it",
    "checkpoints/": "`<group>/<worker>/step-<n>`: see below",
    "evaluations/": "acceptance by real decoding, a file for each checkpoint and arm",
    "workers/": "a summary of each worker that has ended",
    "target-<i>.summary.json": "the account of the rows of a target that has ended",
    "logs/": "a log for each process, of all its starts",
    "cursors/": "where the packing of rows was: a resume goes on from there",
    "recipes/": "which prompts went into which row, where the target answers them",
    "gpus/": "locks of processes on their GPUs, by UUID and service",
    "index/": "where the lines of the data files begin",
    "control.json": "address of `/status`, `/metrics` and the page, while it runs",
    "control.token": "what commands to it need; readable by its owner alone",
    "quorum.json": "address of the quorum server, while it runs",
    "*.sock, *.lock, .*": "sockets, and locks and marks of live processes",
}
"""What each entry of a run directory is."""
_TEXT = """# Run {name}

| file | what |
| --- | --- |
{files}

## Curves

`metrics/<group>-<worker>.jsonl` has a line every `training.log_steps` steps: `time` (seconds since 1970),
`step`, `loss`, `acceptance_rate_at` (by draft position, teacher-forced), `accepted_prefix_length`,
`gradient_norm`, `learning_rate`, `tokens_per_second`, `trained_rows`, `trained_tokens`; and a line with
`held_out` at each measure. A line with `is_resumed` says that training went on from that step: lines
above it with a higher step are of weights that were lost. `metrics/evaluator.jsonl` is of evaluations.

    tensorboard --logdir tensorboard

## Checkpoints

Each `step-<n>` is whole, and a drafter that engines load as it is (`config.json`, `model.safetensors`);
`run.json` in it says where it is from, `trainer/` is for going on. `best` links to the one with the best
acceptance. Starting the run again with this directory goes on from the newest of each worker. Names that
begin with `.unfinished-` or `.replaced-` are of a kill while one was written; the next start sees to them.
"""


def explain(directory: Path, name: str) -> None:
    """Write README.md where there is none."""
    if not (directory / README).exists():
        files = "\n".join(f"| `{file}` | {what} |" for file, what in _FILES.items())
        write_atomically(directory / README, _TEXT.format(name=name, files=files))


def record_start(directory: Path, name: str) -> None:
    """Add this process's start to run.json; those before it stay."""
    path = directory / RUN_RECORD
    start = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command_line": sys.argv,
        "working_directory": str(Path.cwd()),
        "versions": versions(),
        "commit": commit(),
    }
    content = {"run": name, "curves": "metrics/*.jsonl", "starts": [*_starts(path), start]}
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def commit() -> str:
    """Return the commit of the source tree, marked where files differ from it; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    """Return a distribution's version; a source tree may run without being installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _starts(path: Path) -> list[Any]:
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return starts if isinstance(starts, list) else []
