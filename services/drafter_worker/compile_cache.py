"""Compiled code that workers share: a folder, and one worker at a time that fills it.

    open_cache     before torch is loaded: makes the folder, points torch's and Triton's caches at it
    CompileTurn    around a compilation: the first worker compiles, the others wait and find it done

    worker 1   lock -> compile, which fills the cache -> mark as done -> unlock
    worker 2   wait for the mark, or for the lock     -> compile, which finds it
               unblocked by  the mark, the death or failure of worker 1, a stop, the end of its patience

Torch's and Triton's own keys tell GPUs, versions and shapes apart, but not this project's sources: for
torch a custom op is its name, and its gradient would stay that of an older source. The folder is
therefore one for each state of `common/drafters`, where everything that is compiled comes from.
"""

import hashlib
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import common
from common.config.environment import set_where_unset
from common.errors import ConfigError
from common.lifecycle import FileLock, describe_holder, write_atomically

PATIENCE_SECONDS = 300.0
"""More than a cold compilation takes on a GPU, less than after which the watchdog calls it stalled."""
_SOURCES = Path(str(common.__file__)).parent / "drafters"
_POLL_SECONDS = 0.2
_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)

T = TypeVar("T")


def open_cache(place: Path) -> Path:
    """Make the folder for this state of the sources and have torch and Triton use it.

    Call before torch is loaded. Variables that the user has set stay. Raise `ConfigError` where the
    folder cannot be written, or where others could put code into it.
    """
    try:
        root = place.expanduser().absolute()
        folder = root / folder_name(_SOURCES)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_strangers(root)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"drafter.compile_cache {str(place)!r} cannot be made: {error}; choose a folder that can "
            f"be written"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"drafter.compile_cache {str(folder)!r} cannot be written; give it to this user, or "
            f"choose another folder"
        )
    # Triton's is set as well: the project's own kernels are compiled outside torch.compile.
    set_where_unset(
        {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
    )
    return folder


class CompileTurn:
    """One worker's turn to compile one thing. The lock ends with the process, however that ends."""

    def __init__(self, folder: Path, key: str, holder: str) -> None:
        """Equal keys compile the same; `holder` says who compiles, such as "worker main-0"."""
        self._done = folder / f"{key}.done"
        self._lock_path = folder / f"{key}.lock"
        self._lock = FileLock(self._lock_path, holder)
        self.waited_seconds = 0.0
        self.compile_seconds = 0.0

    def take(
        self,
        compile_it: Callable[[], T],
        stop: threading.Event,
        tell: Callable[[str], None],
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> T | None:
        """Compile, after whoever compiles the same for the first time; None when stopped meanwhile.

        Args:
            tell: is told for people what is waited for.
            patience_seconds: how long to wait for a process that holds the lock.
        """
        try:
            self._wait(stop, tell, patience_seconds)
            if stop.is_set():
                return None
            started_at = time.monotonic()
            compiled = compile_it()
            self.compile_seconds = time.monotonic() - started_at
            if not self._done.exists():
                write_atomically(self._done, f"{self.compile_seconds:.1f} s\n")
            return compiled
        finally:
            self._lock.release()

    def _wait(
        self, stop: threading.Event, tell: Callable[[str], None], patience_seconds: float
    ) -> None:
        started_at, logged_at = time.monotonic(), float("-inf")
        while not (self._done.exists() or self._lock.try_acquire()):
            now = time.monotonic()
            self.waited_seconds = now - started_at
            holder = describe_holder(self._lock_path)
            if self.waited_seconds > patience_seconds:
                _log.warning(
                    "%s has held %s for more than %.0f s: compiles without it; is that process stopped?",
                    holder, self._lock_path, patience_seconds,
                )  # fmt: skip
                return
            tell(f"waits for {holder} to compile the same step, {self.waited_seconds:.0f} s")
            if now - logged_at >= _LOG_SECONDS:
                _log.info("waits for %s to compile the same step", holder)
                logged_at = now
            if stop.wait(_POLL_SECONDS):
                return


def folder_name(sources: Path) -> str:
    """Return the folder of what is compiled from the Python files under `sources`."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        torch_version = version("torch")
    except PackageNotFoundError:  # a source tree: torch's own keys tell its versions apart
        torch_version = "source"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch-{torch_version}-python-{python}-{digest.hexdigest()[:12]}"


def _refuse_strangers(root: Path) -> None:
    """Refuse a cache that others can write: what is in it is run."""
    status = root.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"drafter.compile_cache {str(root)!r} is owned by user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}, expected this user's or root's, and writable by no "
            f"others, since code in it is run; choose a folder of your own"
        )
