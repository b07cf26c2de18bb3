"""A control plane as a process of its own, and a service's end of its socket, for tests."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import zmq

from common.contracts.codec import encode
from common.contracts.control_messages import SERVICE_DECODER, ServiceReply
from tests.heartbeats import RUN

WATCHDOG_SECONDS = 30


class Served:
    """A control plane in a process of its own."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.directory = directory
        self.process = start(directory, *settings)
        for line in self.process.stderr:
            if match := re.search(r"serving on (http://\S+)", line):
                break
        else:
            raise AssertionError(f"it ended with exit code {self.process.wait(WATCHDOG_SECONDS)}")
        self.http = httpx.Client(base_url=match[1], timeout=WATCHDOG_SECONDS)

    @property
    def token(self) -> str:
        return (self.directory / "control.token").read_text().strip()

    def status(self) -> dict:
        return self.http.get("/status").raise_for_status().json()

    def until(self, holds: Callable[[dict], bool]) -> dict:
        """Return the first event whose status holds."""
        with self.http.stream("GET", "/events") as events:
            for line in events.iter_lines():
                if line.startswith("data: ") and holds(status := json.loads(line[6:])):
                    return status
        raise AssertionError("the event stream ended")

    def post(self, path: str, token: str | None = None) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return self.http.post(path, headers=headers)

    def close(self, signal_number: int = signal.SIGTERM) -> int:
        self.http.close()
        self.process.send_signal(signal_number)
        try:
            self.process.communicate(timeout=WATCHDOG_SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode


class Line:
    """A service's end of the control socket, with its messages in the test's hands."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{directory / 'control.sock'}")

    def ask(self, message) -> ServiceReply:
        self.socket.send(encode(message))
        assert self.socket.poll(WATCHDOG_SECONDS * 1000), "no reply"
        return SERVICE_DECODER.decode(self.socket.recv())

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def start(directory: Path, *settings: str) -> subprocess.Popen[str]:
    values = (f"run.name={RUN}", f"run.directory={directory}", "control_plane.port=0", *settings)
    command = [sys.executable, "-m", "services.control_plane"]
    for value in values:
        command += ["--set", value]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def refusal(directory: Path, *settings: str) -> tuple[int, str]:
    process = start(directory, *settings)
    try:
        _, text = process.communicate(timeout=WATCHDOG_SECONDS)
    finally:
        process.kill()
    return process.returncode, text


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}
