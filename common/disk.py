"""What a service does on a full disk: it waits, with everything that it has, until there is space."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from common.errors import DiskFullError
from common.folders import is_disk_full

RETRY_SECONDS = 2.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def write_with_patience(
    write: Callable[[], Result],
    stop: threading.Event,
    on_full: Callable[[str], None] = lambda reason: None,  # noqa: ARG005
    retry_seconds: float = RETRY_SECONDS,
) -> Result:
    """Write, again and again while the disk is full; a stop request raises what stands in the way.

    Args:
        write: leaves nothing behind where it fails.
        on_full: is told the reason before each wait.
    """
    is_told = False
    while True:
        try:
            result = write()
        except (OSError, DiskFullError) as error:
            if not (isinstance(error, DiskFullError) or is_disk_full(error)):
                raise
            if not is_told:
                _log.warning("%s; the run waits for space", error)
            is_told = True
            on_full(str(error))
            if stop.wait(retry_seconds):
                raise
            continue
        if is_told:
            _log.info("the disk has space again: the run goes on")
        return result
