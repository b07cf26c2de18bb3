"""One worker compiles a thing for the first time, the others wait; whatever becomes of that worker."""

import os
import queue
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.drafter_worker.compile_cache import folder_name, open_cache

LONG = "600"
Start = Callable[..., "Worker"]


class Worker:
    """A process that takes its turn, and the lines it has printed."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.turn_program", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        with self.process.stdout as pipe:
            for line in pipe:
                self._lines.put(line.strip())

    def _read_errors(self) -> None:
        with self.process.stderr as pipe:
            self._errors.extend(pipe)

    def line(self) -> str:
        return self._lines.get(timeout=60)

    def until(self, start: str) -> list[str]:
        """Return the lines up to the first that begins so."""
        lines = [self.line()]
        while not lines[-1].startswith(start):
            lines.append(self.line())
        return lines

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the log."""
        code = self.process.wait(timeout=60)
        for reader in self._readers:
            reader.join()
        return code, "".join(self._errors)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start_one(holder: str, seconds: object, *more: object, key: str = "step") -> Worker:
        started.append(Worker(tmp_path, key, holder, seconds, *more))
        return started[-1]

    yield start_one
    for worker in started:
        worker.process.kill()
        worker.end()


def test_the_second_worker_waits_for_the_first_and_says_for_whom(start: Start) -> None:
    first = start("worker main-0", 3)
    assert first.line() == "compiling"
    second = start("worker main-1", 0)
    lines = second.until("compiling")
    assert lines[0].startswith(f"waits for worker main-0 (pid {first.process.pid}) to compile")
    assert first.line() == "done"
    assert second.line() == "done"


def test_once_it_is_compiled_nobody_waits(start: Start) -> None:
    assert start("worker main-0", 0).until("done") == ["compiling", "done"]
    workers = [start(f"worker main-{index}", LONG) for index in (1, 2)]
    assert [worker.line() for worker in workers] == ["compiling", "compiling"]


def test_unlike_things_are_compiled_side_by_side(start: Start) -> None:
    workers = [start(f"worker {key}-0", LONG, key=key) for key in ("main", "small")]
    assert [worker.line() for worker in workers] == ["compiling", "compiling"]


def test_a_killed_leader_leaves_the_turn_to_the_next(start: Start) -> None:
    leader = start("worker main-0", LONG)
    assert leader.line() == "compiling"
    second = start("worker main-1", LONG)
    second.until("waits")
    leader.process.kill()
    assert second.until("compiling")[-1] == "compiling"
    third = start("worker main-2", 0)
    assert third.until("waits")[-1].startswith("waits for worker main-1")


def test_a_leader_that_fails_leaves_the_turn_to_the_next(start: Start) -> None:
    leader = start("worker main-0", -0.5)
    assert leader.line() == "compiling"
    assert start("worker main-1", 0).until("done")[-2:] == ["compiling", "done"]
    assert leader.end()[0] == 1


def test_a_stopped_leader_is_waited_for_only_so_long(start: Start, tmp_path: Path) -> None:
    leader = start("worker main-0", 1)
    assert leader.line() == "compiling"
    leader.process.send_signal(signal.SIGSTOP)
    second = start("worker main-1", 0, 1.0)
    assert second.until("done")[-2:] == ["compiling", "done"]
    code, log = second.end()
    assert code == 0
    assert f"WARNING worker main-0 (pid {leader.process.pid}) has held {tmp_path}/step.lock" in log
    # What it has compiled is found by all.
    assert start("worker main-2", 0).until("done") == ["compiling", "done"]
    leader.process.send_signal(signal.SIGCONT)
    assert leader.line() == "done"


def test_a_waiting_worker_stops_when_asked_to(start: Start) -> None:
    leader = start("worker main-0", LONG)
    assert leader.line() == "compiling"
    second = start("worker main-1", 0)
    second.until("waits")
    second.process.send_signal(signal.SIGTERM)
    assert second.until("stopped")[-1] == "stopped"
    assert second.end()[0] == 0


@pytest.fixture
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_clean_environment")
def test_an_open_cache_is_where_torch_and_triton_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = open_cache(Path("~/cache"))
    assert folder.parent == tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/inductor"
    assert os.environ["TRITON_CACHE_DIR"] == f"{folder}/triton"


@pytest.mark.usefixtures("_clean_environment")
def test_a_variable_that_the_user_has_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    folder = open_cache(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/inductor"


def test_a_cache_that_cannot_be_made_or_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"drafter\.compile_cache .*choose a folder"):
        open_cache(tmp_path / "file")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    with pytest.raises(ConfigError, match=r"with mode 1777.*code in it is run"):
        open_cache(tmp_path / "shared")


def test_other_sources_have_another_folder(tmp_path: Path) -> None:
    (tmp_path / "dflash").mkdir()
    source = tmp_path / "dflash" / "loss.py"
    names = set()
    for text in ("slope = 2\n", "slope = 7\n"):
        source.write_text(text)
        names |= {folder_name(tmp_path), folder_name(tmp_path)}
    assert len(names) == 2
    source.rename(tmp_path / "loss.py")
    assert folder_name(tmp_path) not in names


def test_every_custom_op_is_among_the_sources_that_name_the_folder() -> None:
    root = Path(__file__).parents[2]
    paths = [path for top in ("common", "services") for path in (root / top).rglob("*.py")]
    files = {path for path in paths if "custom_op(" in path.read_text(encoding="utf-8")}
    assert files
    assert {path.relative_to(root).parts[:2] for path in files} == {("common", "drafters")}
