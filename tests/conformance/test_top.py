"""`ringdraft top` on a real terminal, before a real control plane."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.cells import cell_len

from common.contracts.placement_messages import GpuClaim
from tests.control_planes import WATCHDOG_SECONDS, Line, Served
from tests.heartbeats import beat, evaluator_report, target_report, worker_report
from tests.seekers import GIB, gpu

ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()].|[=>])")
HOME = "\x1b[H"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
LONG = "a-name-that-has-all-the-forty-characters"
FIGURES = (
    ("group", "workers", "step", "loss", "prefix", "accepted", "best", "held", "rows", "skipped"),
    ("target", "tok/s", "blocked", "captured"),
    ("ring", "slots", "lease", "MiB"),
    ("worker", "step", "loss", "tok/s", "starved", "ago", "held", "MiB", "recompiles", "first"),
    ("evaluated", "step", "accepted", "speed-up", "replay", "temperature"),
)
"""Heads of each table's figures, behind the head of its names."""


class Terminal:
    """A pty with `ringdraft top` on it."""

    def __init__(self, directory: Path, width: int, height: int) -> None:
        self._master, slave = os.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(slave)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher.cli", "top", "--run", str(directory)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, slave, termios.TIOCSCTTY, 0),  # Ctrl-C is its signal
            env={**environment, "TERM": "xterm-256color"},
        )  # fmt: skip
        self._slave = slave
        self.text = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def frame_with(self, *wanted: str) -> list[str]:
        """Return the lines of the next whole frame that has all of this."""
        self.text = ""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while time.monotonic() < deadline:
            self._read()
            for raw in self.text.split(HOME)[1:-1]:
                text = ESCAPE.sub("", raw)
                if all(part in text for part in wanted):
                    return [line.rstrip("\r") for line in text.split("\n")]
        raise AssertionError(f"no frame with {wanted}: {self.text[-2000:]!r}")

    def end(self) -> int:
        """Wait for the end; what it still writes must be read, or it cannot."""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        return self.process.wait(0)

    def attributes(self) -> list:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WATCHDOG_SECONDS)
        os.close(self._slave)
        os.close(self._master)

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.1)[0]:
            self.text += os.read(self._master, 65536).decode(errors="replace")


Open = Callable[[int, int], Terminal]


@pytest.fixture
def open_terminal(directory: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def open_one(width: int, height: int) -> Terminal:
        opened.append(Terminal(directory, width, height))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()


def beat_all(line: Line, num_workers: int = 1) -> None:
    line.ask(beat("target_server", 1, report=target_report()))
    for index in range(num_workers):
        report = worker_report(index=index)
        line.ask(beat("drafter_worker", 10 + index, instance=f"main-{index}", report=report))
    line.ask(beat("evaluator", 3, report=evaluator_report()))


def once(directory: Path, width: int) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "services.launcher.cli", "top", "--once", "--run", str(directory)],
        capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False,
        env={**os.environ, "COLUMNS": str(width)},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (200, 60), (30, 6)])
def test_a_frame_fits_the_terminal_and_has_the_figures(
    served: Served, line: Line, open_terminal: Open, width: int, height: int
) -> None:
    beat_all(line)
    terminal = open_terminal(width, height)
    lines = terminal.frame_with("demo", "running", "7/64 rows")
    assert len(lines) <= height
    assert all(cell_len(text) <= width for text in lines), lines
    text = "\n".join(lines)
    assert ("main-0" in text) == (height > 10)
    assert ("why" in text) == (width == 200)
    if height > 10:
        assert re.search(r"main-0 +running +7 +3\.2500", text)
        assert re.search(r"target-0 +running +1638", text)
        assert "2.500" in text
    terminal.type("q")
    assert terminal.end() == 0


def test_it_follows_a_resize(served: Served, line: Line, open_terminal: Open) -> None:
    beat_all(line)
    terminal = open_terminal(120, 40)
    assert max(map(len, terminal.frame_with("7/64 rows"))) > 80
    terminal.resize(40, 10)
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while max(map(len, lines := terminal.frame_with("7/64 rows"))) > 40:
        assert time.monotonic() < deadline, lines
    assert len(lines) <= 10
    terminal.resize(100, 30)
    while max(map(len, lines := terminal.frame_with("7/64 rows"))) <= 40:
        assert time.monotonic() < deadline, lines


def test_many_workers_are_cut_with_a_count_and_who_is_in_trouble_comes_first(
    served: Served, line: Line, open_terminal: Open
) -> None:
    beat_all(line, num_workers=40)
    terminal = open_terminal(80, 24)
    lines = terminal.frame_with("more lines")
    assert len(lines) <= 24
    served.until(lambda status: all(w["condition"] == "silent" for w in status["workers"]))
    line.ask(beat("drafter_worker", 49, 2, instance="main-39", phase="failed", detail="no memory",
                  report=worker_report(index=39)))  # fmt: skip
    _, whole = once(served.directory, 80)
    assert any("main-39: no memory" in text or "no memory" in text for text in whole)
    assert sum(text.startswith("main-") for text in whole) >= 40


@pytest.mark.parametrize("end", ["Q", "\x03", "term"])
def test_it_ends_on_a_key_and_leaves_the_terminal_as_it_was(
    served: Served, open_terminal: Open, end: str
) -> None:
    terminal = open_terminal(80, 24)
    terminal.frame_with("demo")
    assert not terminal.attributes()[3] & termios.ECHO
    if end == "term":
        terminal.process.send_signal(signal.SIGTERM)
    else:
        terminal.type("x" + end)
    assert terminal.end() == 0
    assert terminal.attributes() == terminal.before
    assert terminal.text.endswith("\x1b[?25h\x1b[?1049l"), "cursor and screen are back"


def test_it_goes_on_without_a_control_plane_and_says_so(
    served: Served, line: Line, open_terminal: Open
) -> None:
    beat_all(line)
    terminal = open_terminal(80, 24)
    terminal.frame_with("7/64 rows")
    served.close()
    terminal.frame_with("control plane not reachable, trying again", "7/64 rows")
    again = Served(served.directory)
    try:
        lines = terminal.frame_with("waiting 0/? rows")
        assert "not reachable" not in "\n".join(lines)
    finally:
        again.close()


def test_one_frame_ends_by_itself(served: Served, line: Line) -> None:
    beat_all(line)
    served.until(lambda status: status["evaluators"])
    for width in (24, 40, 80, 160):
        code, lines = once(served.directory, width)
        assert code == 0
        assert lines[0].startswith("demo ")
        assert any(text.startswith("main-0") for text in lines)
        assert all(cell_len(text) <= width for text in lines)
        assert any(text.endswith(ELLIPSIS) for text in lines) == (width == 24)
    served.close()
    code, lines = once(served.directory, 80)
    assert (code, lines) == (1, ["control plane not reachable, trying again"])


def test_it_shows_who_has_which_gpu(served: Served, line: Line) -> None:
    claim = GpuClaim(gpus=(gpu(0), gpu(1)), num_bytes=GIB, held="GPU-0001")
    report = worker_report(gpu_uuid="GPU-0001")
    line.ask(beat("drafter_worker", 2, instance="main-0", report=report, claim=claim))
    code, lines = once(served.directory, 300)
    assert code == 0
    assert any(text.split() == ["GPU-0000", "-", "142336", "143360", "H200"] for text in lines)
    assert any(text.split()[:2] == ["GPU-0001", "main-0"] for text in lines)
    assert any("main-0" in text and "GPU-0001" in text for text in lines if "running" in text)


@pytest.mark.parametrize("group", ["main", LONG])
def test_80_columns_have_every_figure_whatever_the_names(
    served: Served, line: Line, open_terminal: Open, group: str
) -> None:
    report = worker_report(group=group, step=123_456, trained_rows=1_234_567, loss=12.3456)
    line.ask(beat("target_server", 1, report=target_report()))
    for index in range(2):
        line.ask(beat("drafter_worker", 10 + index, instance=f"{group}-{index}", report=report,
                      detail="step 123456"))  # fmt: skip
    line.ask(beat("evaluator", 3, report=evaluator_report()))
    served.until(lambda status: status["evaluators"])
    code, lines = once(served.directory, 80)
    assert code == 0
    assert all(cell_len(text) <= 80 for text in lines)
    tables = "\n".join(lines).split("\n\n")
    for first, *heads in FIGURES:
        shown = [word for table in tables if table.startswith(first) for word in table.split()]
        assert [head for head in heads if head not in shown] == [], lines
    names = {text.split()[0] for text in lines if text.startswith(group[:5]) and "12.3456" in text}
    ends = sorted(name[-2:] for name in names)
    assert ends == (["-0", "-1", "rs"] if group == LONG else ["-0", "-1", "in"]), names
    assert all(ELLIPSIS in name for name in names) == (group == LONG)
    assert re.search(r"12\.3456", "\n".join(open_terminal(80, 24).frame_with("12.3456")))


def test_without_a_terminal_it_names_the_way_out(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.launcher.cli", "top", "--run", str(served.directory)],
        capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--once" in done.stderr


def test_text_of_other_processes_moves_no_cursor(served: Served, line: Line) -> None:
    line.ask(beat("drafter_worker", detail="\x1b[2J\x07gone", errors=("bad\x1b]0;title\x07",)))
    served.until(lambda status: status["workers"])
    _, lines = once(served.directory, 200)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "gone" in text
    assert "bad" in text
