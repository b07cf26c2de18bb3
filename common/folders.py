"""Folders that are there whole or not at all, and files of lines that survive a kill at any byte."""

import contextlib
import errno
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"
"""Prefix of the name under which a folder is written."""
REPLACED = ".replaced-"
"""Prefix of the name that a folder has between its removal and its successor's arrival."""
_CHUNK_BYTES = 1 << 16
_STEP = re.compile(r"step-(\d+)")


@contextlib.contextmanager
def whole_folder(final: Path, *, replace: bool = False, writer: str = "") -> Iterator[Path]:
    """Give a fresh folder beside `final` and make it `final` at the end; on an error leave nothing.

    Where `final` is a folder with content, the end raises `OSError`, or removes it to `replace` it; a
    kill between leaves it under another name, from which `restore_replaced` brings it back. A name is
    written by one process at a time, or by several that each have a `writer` of their own.
    """
    temporary = final.with_name(f"{UNFINISHED}{final.name}{writer}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_tree(temporary)
        if replace and final.exists():
            _replace(final, temporary, final.with_name(f"{REPLACED}{final.name}{writer}"))
        else:
            temporary.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def step_folders(series: Path) -> list[Path]:
    """Return a series' checkpoints, `step-<number>`, lowest first; other names, as of copies, are not its."""
    return sorted((p for p in series.glob("step-*") if _STEP.fullmatch(p.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number in the name of one of `step_folders`."""
    return int(checkpoint.name.removeprefix("step-"))


def restore_replaced(aside: Path, final: Path) -> None:
    """End a replacement that was cut off: one of the two folders stays, under the final name."""
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(final)


def _replace(final: Path, successor: Path, aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    final.rename(aside)
    successor.rename(final)
    _sync(final.parent)
    shutil.rmtree(aside)


def is_disk_full(error: Exception) -> bool:
    """Whether an error of writing, or of safetensors, which reports the system's as text, is that."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)


def append_whole(file: io.FileIO, content: bytes) -> None:
    """Append to an unbuffered file; where that raises `OSError`, such as on a full disk, nothing."""
    end = os.fstat(file.fileno()).st_size
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def cut_torn_line(fd: int) -> None:
    """Cut off what lies behind the last newline."""
    end = os.fstat(fd).st_size
    position = end
    while position > 0:
        start = max(position - _CHUNK_BYTES, 0)
        newline = os.pread(fd, position - start, start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        os.ftruncate(fd, position)


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
