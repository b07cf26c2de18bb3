"""How a process begins and ends: stop signals, death with its parent, locks, exit codes.

`python -m services.X` is `sys.exit(run_service(main))`, where `main(stop)` builds the service and
runs it until `stop` is set. The first SIGTERM or SIGINT sets the event, a second one ends the
process on the spot; what that leaves behind is reclaimed at the next start. SIGUSR1 has every
thread's stack written to stderr, which is the service's log, and so has a fatal fault.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from common.errors import ConfigError, PlacementError, RingdraftError

EXIT_CLEAN = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_NO_PLACE = 75
"""No GPU had room for it, as sysexits.h has it for what may do later."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Signals this close together are one request: a wrapper may pass on what the terminal has sent
# as well, and the kernel repeats the signal of `die_with_parent` for each thread of the parent.
_SAME_REQUEST_SECONDS = 0.5
STACKS_SIGNAL = signal.SIGUSR1
_STDERR = 2
_PR_SET_PDEATHSIG = 1
# Loaded here because a child must not load anything between its fork and its exec.
_LIBC = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger(__name__)


def run_service(main: Callable[[threading.Event], int | None]) -> int:
    """Run `main` with a stop event and return the exit code; the process's only catch-all."""
    tell_stacks()
    try:
        return main(stop_on_signals()) or EXIT_CLEAN
    except ConfigError as error:
        _log.error("%s", error)
        return EXIT_CONFIG
    except PlacementError as error:
        _log.error("%s", error)
        return EXIT_NO_PLACE
    except RingdraftError as error:
        _log.critical("%s: %s", type(error).__name__, error, exc_info=True)
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001
        _log.critical("unexpected %s: %s", type(error).__name__, error, exc_info=True)
        return EXIT_FAILED


def tell_stacks() -> None:
    """Have SIGUSR1, and a fatal fault, write every thread's stack to stderr.

    The handler is not Python's, so it also answers for a process that holds the interpreter's lock
    in a native call and so sends no heartbeat either.
    """
    faulthandler.enable(_STDERR)
    faulthandler.register(STACKS_SIGNAL, _STDERR, all_threads=True)


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and the like without looking for garbage, then or later, in what they load.

    Collections while the heap grows take a fifth of the time of these imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets. Call once, in the main thread.

    A thread sets the event. A Python handler would run inside whatever the main thread does,
    perhaps inside that event's own lock, and not at all while it sits in a long native call.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS:
        signal.signal(number, _noted)
    atexit.register(_ignore_stop_signals)
    threading.Thread(
        target=_watch_signals, args=(reader, stop), name="stop-signals", daemon=True
    ).start()
    return stop


def process_age_seconds() -> float:
    """Return the time since the kernel made this process, the interpreter's own start included."""
    # The command's name, in brackets, may hold blanks; the start is field 22, in clock ticks.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_at = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel signal this child when its parent dies; for `preexec_fn`.

    The kernel watches the parent's *thread* that forked, so fork from a thread that lasts.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(128 + signal_number)


class FileLock:
    """An advisory lock on a file, held until `release` or the death of this process.

    The kernel drops it with the process, so a lock that cannot be had always has a live holder.
    The file stays: unlinking it would let two processes hold locks of the same name.
    """

    def __init__(self, path: Path, holder: str) -> None:
        """`holder` says what holds the lock, such as "control plane of run 'a'"."""
        self._path = path
        self._holder = holder
        self._fd = -1

    def acquire(self, remedy: str) -> "FileLock":
        """Take the lock, or raise `ConfigError` naming its holder and the `remedy`."""
        if not self.try_acquire():
            raise ConfigError(
                f"{str(self._path)!r} is locked by {describe_holder(self._path)}; {remedy}"
            )
        return self

    def try_acquire(self) -> bool:
        """Take the lock if nobody holds it; raise `ConfigError` where the file cannot be made."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{str(self._path)!r} cannot be made: {error.strerror}; choose a run.directory that "
                f"can be written"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "holder": self._holder}).encode(), 0)
        self._fd = fd
        return True

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def claim_lowest(paths: Iterable[Path], holder: str) -> tuple[int, FileLock] | None:
    """Take the first lock that nobody holds; return its place and the lock, None without one."""
    for index, path in enumerate(paths):
        lock = FileLock(path, holder)
        if lock.try_acquire():
            return index, lock
    return None


def lock_holder(path: Path) -> int | None:
    """Return the pid of the live holder of a `FileLock`, or None where nobody holds it."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _read_holder(path).get("pid")
        return pid if isinstance(pid, int) else None
    finally:
        os.close(fd)
    return None


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the whole of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _noted(number: int, frame: FrameType | None) -> None:
    """Replace the default action; the wake-up descriptor has told the watching thread."""


def _ignore_stop_signals() -> None:
    """Keep a late signal from ending the interpreter's own shutdown, which restores defaults."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _watch_signals(reader: int, stop: threading.Event) -> None:
    requested_at = None
    while True:
        for number in os.read(reader, 64):
            if number not in _STOP_SIGNALS:
                continue
            if requested_at is None:
                requested_at = time.monotonic()
                stop.set()
            elif time.monotonic() - requested_at > _SAME_REQUEST_SECONDS:
                os._exit(128 + number)


def describe_holder(path: Path) -> str:
    """Say who holds, or held last, a `FileLock`."""
    holder = _read_holder(path)
    return f"{holder.get('holder', 'another process')} (pid {holder.get('pid', 'unknown')})"


def _read_holder(path: Path) -> dict[str, object]:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it was read between the holder's lock and its note
        return {}
    return holder if isinstance(holder, dict) else {}
