"""`ringdraft top`: a run's figures in a terminal, as they change.

    consumes    what a `StatusFeed` has fetched; keys; the terminal's size, at each frame
    produces    a frame four times a second, on the terminal's other screen
    waits for   a key, a stop          unblocked by  its timeout

The control plane may come, go and come back meanwhile.
"""

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from common.errors import ConfigError
from common.lifecycle import EXIT_CLEAN, EXIT_FAILED
from services.launcher.frame import frame
from services.launcher.progress import StatusFeed
from services.launcher.rundir import find_run

_FRAME_SECONDS = 0.25
_QUIT_KEYS = b"qQ\x04"
_KEYS_AT_ONCE = 64


def show_frame(given: Path | None) -> int:
    """Print one frame, whole, on stdout; exit with 1 where no control plane answers."""
    feed = StatusFeed(find_run(given))
    feed.fetch()
    console = _console()
    for line in frame(feed.latest, is_answered=feed.is_answered, width=console.width, height=None):
        console.print(line, no_wrap=True, crop=True)
    return EXIT_CLEAN if feed.is_answered else EXIT_FAILED


def watch_run(given: Path | None, stop: threading.Event) -> int:
    """Draw frames until q, Ctrl-C or a stop."""
    directory = find_run(given)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "stdin or stdout is no terminal, which top draws on; `ringdraft top --once` prints a "
            "frame anywhere"
        )
    with (
        StatusFeed(directory) as feed,
        _keys_at_once(),
        Live(console=_console(), screen=True, auto_refresh=False) as live,
    ):
        while not stop.is_set() and not _wants_to_quit():
            live.update(_picture(feed, live.console), refresh=True)
    return EXIT_CLEAN


def _picture(feed: StatusFeed, console: Console) -> Group:
    width, height = console.size
    return Group(*frame(feed.latest, is_answered=feed.is_answered, width=width, height=height))


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Have keys come without Enter and unseen; the terminal is put back as it was."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)  # Ctrl-C still is a signal
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wants_to_quit() -> bool:
    """Wait for a key until the next frame is due."""
    if not select.select([sys.stdin], [], [], _FRAME_SECONDS)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), _KEYS_AT_ONCE)
    return not keys or not set(keys).isdisjoint(_QUIT_KEYS)  # none: the terminal is gone
