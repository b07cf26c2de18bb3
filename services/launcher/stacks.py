"""`ringdraft stacks`: has services of a live run write what their threads are at into their logs.

A service whose heartbeats come is asked through the control plane, wherever it runs. One that is
silent hears no command, but its process answers a signal, if it is one of this launcher's children.
"""

import json
import os
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from common.errors import ConfigError, RingdraftError
from common.lifecycle import EXIT_CLEAN, STACKS_SIGNAL
from services.launcher.progress import fetch_status, open_url
from services.launcher.rundir import control_token, control_url, find_run, launcher_pid

_TIMEOUT_SECONDS = 5.0


def ask_for_stacks(given: Path | None, instance: str | None) -> int:
    """Ask one service, or all that are stalled or silent, and say where the answer will be."""
    directory = find_run(given)
    status = fetch_status(directory)
    if status is None:
        raise ConfigError(
            f"no control plane answers for {str(directory)!r}; is the run alive? "
            f"SIGUSR1 to a service's pid does the same"
        )
    for view in _chosen(status, instance):
        if view["condition"] == "silent":
            _signal(directory, view)
        else:
            _ask(directory, view["instance"])
        print(  # noqa: T201
            f"{view['instance']} (pid {view['pid']}, {view['condition']}): its stacks come into "
            f"{_log_of(view['pid'], directory)}",
            file=sys.stderr,
        )
    return EXIT_CLEAN


def _chosen(status: dict[str, Any], instance: str | None) -> list[dict[str, Any]]:
    views = [*status["target"]["instances"], *status["workers"], *status["evaluators"]]
    live = [view for view in views if view["condition"] in ("ok", "stalled", "silent")]
    names = ", ".join(sorted({view["instance"] for view in live})) or "none"
    if instance is None:
        chosen = [view for view in live if view["condition"] != "ok"]
        if not chosen:
            raise ConfigError(f"no service is stalled or silent; name one of: {names}")
        return chosen
    chosen = [view for view in live if view["instance"] == instance]
    if not chosen:
        raise ConfigError(f"no live service {instance!r}; there are: {names}")
    return chosen


def _ask(directory: Path, instance: str) -> None:
    path = f"/services/{urllib.parse.quote(instance, safe='')}/stacks"
    request = urllib.request.Request(
        f"{control_url(directory)}{path}",
        method="POST",
        headers={"authorization": f"Bearer {control_token(directory)}"},
    )
    try:
        open_url(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError as error:
        with error:
            detail = json.load(error).get("detail", error.reason)
        raise RingdraftError(f"{instance}: the control plane refused: {detail}") from error
    except OSError as error:
        raise RingdraftError(f"{instance}: the control plane does not answer: {error}") from error


def _signal(directory: Path, view: dict[str, Any]) -> None:
    """Signal a silent service, if it is a child of the launcher: its pid may be another's by now."""
    pid, launcher = view["pid"], launcher_pid(directory)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise RingdraftError(f"{view['instance']} is silent and pid {pid} has ended") from error
    try:
        if _parent_of(pid) != launcher:
            raise RingdraftError(
                f"{view['instance']} is silent, and pid {pid} here is no child of the launcher "
                f"(pid {launcher}); if it is the service's, send it SIGUSR1 yourself"
            )
        signal.pidfd_send_signal(process, STACKS_SIGNAL)
    finally:
        os.close(process)


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _log_of(pid: int, directory: Path) -> Path:
    """Return where the process's stderr goes, if that is a file of this machine."""
    try:
        log = Path(f"/proc/{pid}/fd/2").readlink()
    except OSError:
        log = Path()
    return log if log.is_file() else directory / "logs"
