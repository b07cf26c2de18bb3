"""What `ringdraft` finds in run directories: which run is alive, where it serves, what it left."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.lifecycle import lock_holder

RUNS = Path("runs")
LOCK_NAME = "launcher.lock"
STOP_NAME = ".stop-requested"
RECORD_NAME = "launcher.json"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of one drafter."""

    group: str
    index: int
    step: int
    path: Path


def find_run(given: Path | None) -> Path:
    """Return the directory of the live run that is meant, or raise `ConfigError`."""
    if given is not None:
        if not given.is_dir():
            raise ConfigError(f"--run {str(given)!r} is not a directory; name a run's directory")
        return given
    live = [path.parent for path in RUNS.glob(f"*/{LOCK_NAME}") if lock_holder(path) is not None]
    if len(live) == 1:
        return live[0]
    found = ", ".join(str(path) for path in sorted(live)) or "none"
    raise ConfigError(
        f"no single live run under {str(RUNS)!r}: found {found}; name one with --run DIR"
    )


def launcher_pid(directory: Path) -> int:
    """Return the pid of the launcher that holds the run, or raise `ConfigError`."""
    pid = lock_holder(directory / LOCK_NAME)
    if pid is None:
        raise ConfigError(f"run {str(directory)!r} is not running: no launcher holds {LOCK_NAME}")
    return pid


def control_url(directory: Path) -> str | None:
    """Return the address of the run's control plane, or None where none is published."""
    url = read_object(directory / "control.json").get("url")
    return url if isinstance(url, str) else None


def control_token(directory: Path) -> str:
    """Return the token that commands to the run's control plane need."""
    return (directory / "control.token").read_text(encoding="utf-8").strip()


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty where it is absent or not one."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def first_and_last_checkpoints(directory: Path) -> list[tuple[Checkpoint, Checkpoint]]:
    """Return each drafter's first and last checkpoint, ordered by group and index."""
    by_drafter: dict[tuple[str, int], list[Checkpoint]] = {}
    for checkpoint in _checkpoints(directory / "checkpoints"):
        by_drafter.setdefault((checkpoint.group, checkpoint.index), []).append(checkpoint)
    series = [sorted(by_drafter[key], key=lambda c: c.step) for key in sorted(by_drafter)]
    return [(checkpoints[0], checkpoints[-1]) for checkpoints in series]


def _checkpoints(root: Path) -> Iterator[Checkpoint]:
    """Yield whole checkpoints; one that is being written has another name."""
    for path in root.glob("*/*/step-*"):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and path.parent.name.isdecimal():
            yield Checkpoint(path.parent.parent.name, int(path.parent.name), int(match[1]), path)
