"""`ringdraft scale N`: another number of workers for a live run.

    this command --> <run>/scale.json --> the launcher, at its next tick, which removes it

A file, since the launcher has no socket: it is there whole or not at all, and whoever can write in the
run's directory may ask.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError, RingdraftError
from common.lifecycle import EXIT_CLEAN, write_atomically
from services.launcher.rundir import find_run, launcher_pid, read_object

REQUEST_NAME = "scale.json"
MOST_WORKERS = 64
_ANSWER_SECONDS = 15.0
_LOOK_SECONDS = 0.05


def ask_to_scale(given: Path | None, group: str, count: int) -> int:
    """Ask the launcher of a live run for so many workers of a group, and wait until it has heard."""
    if not 1 <= count <= MOST_WORKERS:
        raise ConfigError(
            f"scale got {count}, expected 1 to {MOST_WORKERS} workers; `ringdraft stop` ends a run"
        )
    directory = find_run(given)
    pid = launcher_pid(directory)
    group = _known_group(directory, group)
    request = directory / REQUEST_NAME
    write_atomically(request, json.dumps({"group": group, "workers": count}))
    deadline = time.monotonic() + _ANSWER_SECONDS
    while request.exists():
        if time.monotonic() >= deadline:
            request.unlink(missing_ok=True)
            raise RingdraftError(
                f"launcher pid {pid} of {str(directory)!r} has not taken the request in "
                f"{_ANSWER_SECONDS:g} s: it starts, stops or evaluates; try again while it trains"
            )
        time.sleep(_LOOK_SECONDS)  # noqa: TID251 - nothing tells of a file's end
    print(f"{directory}: {count} workers of group {group!r}", file=sys.stderr)  # noqa: T201
    return EXIT_CLEAN


def take_request(directory: Path, act: Callable[[str, int], None]) -> None:
    """Act on a request, if there is a sensible one: (group, number of workers)."""
    path = directory / REQUEST_NAME
    if not path.exists():
        return
    request = read_object(path)
    group, workers = request.get("group"), request.get("workers")
    if isinstance(group, str) and isinstance(workers, int) and 1 <= workers <= MOST_WORKERS:
        act(group, workers)
    path.unlink(missing_ok=True)


def _known_group(directory: Path, group: str) -> str:
    groups = sorted(read_object(directory / "config.json")["launcher"]["groups"])
    if not group and len(groups) == 1:
        return str(groups[0])
    if group not in groups:
        raise ConfigError(f"--group got {group!r}, expected one of {', '.join(groups)}")
    return group
