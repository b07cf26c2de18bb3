"""Folders that are there whole or not at all: written under another name, made durable, renamed."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"
"""Prefix of the name under which a folder is written."""


@contextlib.contextmanager
def whole_folder(final: Path, *, replace: bool = False, writer: str = "") -> Iterator[Path]:
    """Give a fresh folder beside `final` and make it `final` at the end; on an error leave nothing.

    Where `final` is a folder with content, the end raises `OSError`, or removes it to `replace` it.
    A name is written by one process at a time, or by several that each have a `writer` of their own.
    """
    temporary = final.with_name(f"{UNFINISHED}{final.name}{writer}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_tree(temporary)
        if replace and final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_disk_full(error: Exception) -> bool:
    """Whether an error of writing, or of safetensors, which reports the system's as text, is that."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
