"""The project's compose files on a real engine: one project with names and a port of its own."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FILES = ("compose/compose.yaml", "compose/compose.monitoring.yaml", "tests/docker/cut_short.yaml")
# Watchdogs, and no claim on speed: three workers start and train on what may be two cores.
BUILD_SECONDS = 1500.0
WAIT_SECONDS = 300.0
SERVICES = ("namespaces", "control-plane", "target-server", "drafter-worker")


def why_no_engine() -> str:
    """Return why nothing can be run in containers here; empty where it can."""
    found = subprocess.run([HERE / "engine.sh", "find"], capture_output=True, text=True)
    if found.returncode:
        return found.stdout.strip()
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim")
    if docker("image", "inspect", base, check=False).returncode == 0:
        return ""
    if docker("pull", "--quiet", base, check=False).returncode == 0:
        return ""
    return f"base image {base} is neither here nor can it be pulled; set BASE_IMAGE"


def docker(*arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run docker and return what it says."""
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, cwd=ROOT, check=False, **options
    )
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}: {done.stderr[-4000:]}")
    return done


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Stack:
    """One compose project."""

    def __init__(self, name: str, **variables: str) -> None:
        self.project = f"ringdraft-test-{name}-{os.getpid()}"
        self.port = free_port()
        settings = {"TAG": "test", "CONTROL_PORT": str(self.port), **variables}
        self._environment = os.environ | settings

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` for this project."""
        files = [part for file in FILES for part in ("--file", file)]
        head = ("compose", "--project-directory", str(ROOT), "--project-name", self.project)
        return docker(*head, *files, *arguments, check=check, env=self._environment)

    def up(self, *arguments: str) -> None:
        """Start services in the background."""
        self.up_with((), *arguments)

    def up_with(self, profiles: tuple[str, ...], *arguments: str) -> None:
        """Start services, those of profiles too."""
        chosen = [part for profile in profiles for part in ("--profile", profile)]
        self.compose(*chosen, "up", "--detach", "--no-build", *arguments)

    def down(self) -> None:
        """Remove all of it."""
        profiles = ("--profile", "eval", "--profile", "sync", "--profile", "monitoring")
        self.compose(*profiles, "down", "--volumes", "--remove-orphans", "--timeout", "20")

    def containers(self, service: str = "") -> list[str]:
        """Return ids of containers, stopped ones too."""
        return self.compose(
            "ps", "--all", "--quiet", *([service] if service else [])
        ).stdout.split()

    def left(self) -> list[str]:
        """Return what the engine still has of this project."""
        label = ("--filter", f"label=com.docker.compose.project={self.project}", "--quiet")
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [line for kind in kinds for line in docker(*kind, *label).stdout.split()]

    def status(self) -> dict[str, Any]:
        """Return what /status says; empty where nobody answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/status", timeout=10).json()
        except httpx.HTTPError:
            return {}

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the live workers that have reported, by instance."""
        return {
            worker["instance"]: worker
            for worker in self.status().get("workers", [])
            if worker["condition"] == "ok" and worker["report"]
        }

    def wait_for(self, what: str, holds: Callable[[], Any]) -> Any:
        """Return the first true value of `holds`, or fail with the last lines of every log."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := holds()):
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--no-color", "--tail", "20", check=False).stdout
                raise AssertionError(f"no {what} in {WAIT_SECONDS:.0f} s; {self.status()}\n{logs}")
            time.sleep(0.5)
        return found

    def wait_for_steps(self, num_workers: int, beyond: int = 0) -> dict[str, dict[str, Any]]:
        """Wait until so many workers have made more steps than `beyond` each."""

        def trained() -> dict[str, dict[str, Any]]:
            found = {n: w for n, w in self.workers().items() if w["report"]["step"] > beyond}
            return found if len(found) >= num_workers else {}

        return self.wait_for(f"step {beyond + 1} of {num_workers} workers", trained)
