"""A control plane as a process of its own, and a service's end of its socket, for tests."""

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import zmq

from common.contracts.codec import encode
from common.contracts.control_messages import SERVICE_DECODER, ServiceReply
from tests.forks import Fork, load_before_forks
from tests.heartbeats import RUN
from tests.rings import wait_until

WATCHDOG_SECONDS = 30
load_before_forks("services.control_plane.server")


class Served:
    """A control plane in a process of its own."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.directory = directory
        self.process, log = start(directory, *settings)
        try:
            self.http = client(self._address(log), WATCHDOG_SECONDS)
        finally:
            log.unlink()

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
            return self.process.wait(WATCHDOG_SECONDS)
        finally:
            self.process.kill()

    def _address(self, log: Path) -> str:
        """Return where it says that it serves."""
        said: list[str] = []

        def has_begun() -> bool:
            is_over = self.process.poll() is not None
            said[:] = re.findall(r"serving on (http://\S+)\n", log.read_text())
            assert said or not is_over, log.read_text()
            return bool(said)

        wait_until(has_begun, "it serves")
        return said[0]


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


@pytest.fixture
def directory() -> Iterator[Path]:
    # Shorter than tmp_path, whose sockets could have paths of more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ringdraft-test-") as path:
        yield Path(path)


@pytest.fixture
def control_settings() -> tuple[str, ...]:
    """Settings of the control plane that `served` starts."""
    return ()


@pytest.fixture
def served(directory: Path, control_settings: tuple[str, ...]) -> Iterator[Served]:
    served = Served(directory, *control_settings)
    yield served
    served.close()


@pytest.fixture
def line(served: Served) -> Iterator[Line]:
    line = Line(served.directory)
    yield line
    line.close()


def client(url: str = "", timeout: float = WATCHDOG_SECONDS) -> httpx.Client:
    """Return a client that loads no certificates: that takes as long as a hundred requests."""
    return httpx.Client(base_url=url, timeout=timeout, verify=False)


def start(directory: Path, *settings: str) -> tuple[Fork, Path]:
    """Return the process, forked, and the file that its output goes to."""
    values = (f"run.name={RUN}", f"run.directory={directory}", "control_plane.port=0", *settings)
    arguments = [part for value in values for part in ("--set", value)]
    descriptor, log = tempfile.mkstemp(prefix="ringdraft-test-", suffix=".log")
    os.close(descriptor)
    return Fork(
        "services.control_plane", *arguments, environment=dict(os.environ), stdout=Path(log),
        stderr=Path(log),
    ), Path(log)  # fmt: skip


def refusal(directory: Path, *settings: str) -> tuple[int, str]:
    """Return exit code and output of a control plane that does not come to serve."""
    process, log = start(directory, *settings)
    try:
        return process.wait(WATCHDOG_SECONDS), log.read_text()
    finally:
        process.kill()
        log.unlink()


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}
