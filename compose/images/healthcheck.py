"""Says by its exit code whether a service is well: `python3 healthcheck.py progress`.

    progress       the service of this container gets on, by what the control plane says of it
    control-plane  /healthz answers
    quorum-server  the address of each group's lighthouse can be connected to

The control plane tells progress from mere life, and knows how long a compilation may take. The service
is found by its PID: the one in /status whose process has this container's mount namespace. Where the
control plane does not answer, or has not heard of the service, life is enough; its own check tells.
"""

import json
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_CONTROL_PLANE = "http://127.0.0.1:8765"
_SECONDS = 3.0
_BAD = ("silent", "stalled", "failed")


def main(what: str) -> int:
    """Check, print what is found, and return the exit code."""
    complaint = {
        "progress": why_no_progress,
        "control-plane": why_no_answer,
        "quorum-server": why_no_lighthouse,
    }[what]()
    print(complaint or "well")
    return 1 if complaint else 0


def why_no_progress() -> str:
    """Return what the control plane says against this container's service; empty where nothing."""
    try:
        with urllib.request.urlopen(f"{_CONTROL_PLANE}/status", timeout=_SECONDS) as answer:
            status = json.load(answer)
    except (OSError, ValueError):
        return ""
    for instance in _instances(status):
        if instance["condition"] in _BAD and _is_of_this_container(instance["pid"]):
            age = instance["progress_age_seconds"]
            return f"{instance['instance']} is {instance['condition']}: no progress for {age:.0f} s"
    return ""


def why_no_answer() -> str:
    """Return what is wrong with the control plane's own answer."""
    try:
        urllib.request.urlopen(f"{_CONTROL_PLANE}/healthz", timeout=_SECONDS).close()
    except OSError as error:
        return f"{_CONTROL_PLANE}/healthz: {error}"
    return ""


def why_no_lighthouse() -> str:
    """Return which lighthouse cannot be reached."""
    path = Path(os.environ["RINGDRAFT_RUN__DIRECTORY"]) / "quorum.json"
    try:
        for url in json.loads(path.read_text(encoding="utf-8"))["groups"].values():
            place = urlsplit(url)
            socket.create_connection((place.hostname, place.port), _SECONDS).close()
    except (OSError, ValueError, KeyError) as error:
        return f"{path}: {error}"
    return ""


def _instances(status: dict) -> Iterator[dict]:
    yield from status["target"]["instances"]
    yield from status["workers"]
    yield from status["evaluators"]


def _is_of_this_container(pid: int) -> bool:
    """Whether a process of the shared PID namespace runs in this container."""
    try:
        return Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
    except OSError:  # it has ended
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
