"""What the scripts that make rings share: option types, and an end that leaves nothing behind."""

import argparse
import signal
import sys

from common.ring.segment import reclaim_dead_segments


def positive(text: str) -> int:
    """Return a whole number from 1 on, or tell argparse what is wrong."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def tidy_shared_memory() -> None:
    """Remove what killed runs left, and let SIGTERM end this one as Ctrl-C does."""
    reclaim_dead_segments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
