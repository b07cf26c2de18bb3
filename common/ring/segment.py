"""Memory that holds the slots: a file in /dev/shm (host), or this process's own (memory).

The one door to OS shared memory. A host segment is a file made with O_EXCL, mode 0600 and
posix_fallocate, so that a full /dev/shm is an error here and not a SIGBUS later. Its owner holds an
flock on it for life: a segment whose lock can be taken has no owner and is reclaimed at start-up.
"""

import errno
import fcntl
import logging
import mmap
import os
from pathlib import Path
from typing import Protocol

from common.contracts.ring_messages import SegmentRef
from common.errors import ConfigError, LayoutMismatchError, SegmentError

SEGMENT_DIRECTORY = Path("/dev/shm")  # noqa: S108 - the place of POSIX shared memory
SEGMENT_PREFIX = "ringdraft-"
_log = logging.getLogger(__name__)


class Segment(Protocol):
    """One ring's memory in this process."""

    ref: SegmentRef
    view: memoryview

    def close(self) -> None:
        """Drop the mapping; an owner's close also removes the segment."""


class HostSegment:
    """A file in /dev/shm, mapped. Create it as the owner or attach to it as a reader."""

    def __init__(self, ref: SegmentRef, descriptor: int, *, is_owner: bool) -> None:
        self.ref = ref
        self._path = SEGMENT_DIRECTORY / ref.name
        self._descriptor = descriptor
        self._is_owner = is_owner
        self._map = mmap.mmap(descriptor, ref.num_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, num_slots: int, slot_bytes: int) -> "HostSegment":
        """Make and lock a segment; raise `ConfigError` where it does not fit."""
        num_bytes = num_slots * slot_bytes
        path = SEGMENT_DIRECTORY / name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError as error:
            raise ConfigError(
                f"segment {path} exists already: an older run's or another run's; stop that run, "
                f"or remove the file if no process of it is left"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(_too_small(num_slots, slot_bytes)) from error
        ref = SegmentRef(backing="host", name=name, num_bytes=num_bytes, num_slots=num_slots,
                         owner_pid=os.getpid())  # fmt: skip
        return cls(ref, descriptor, is_owner=True)

    @classmethod
    def attach(cls, ref: SegmentRef) -> "HostSegment":
        """Map an owner's segment; its name and size come from the wire and are checked."""
        if "/" in ref.name or not ref.name.startswith(SEGMENT_PREFIX):
            raise LayoutMismatchError(f"segment name {ref.name!r} is not a ring's; message refused")
        path = SEGMENT_DIRECTORY / ref.name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(
                f"segment {path}: {error.strerror}; worker and target server must share /dev/shm "
                f"(containers: ipc of one service)"
            ) from error
        size = os.fstat(descriptor).st_size
        if size != ref.num_bytes:
            os.close(descriptor)
            raise LayoutMismatchError(f"segment {path}: got {size} bytes, expected {ref.num_bytes}")
        return cls(ref, descriptor, is_owner=False)

    def close(self) -> None:
        """Unmap; the owner removes the file first, so no newcomer attaches to a dying ring."""
        if self._is_owner:
            self._path.unlink(missing_ok=True)
        self.view.release()
        try:
            self._map.close()
        except BufferError:  # a tensor still looks at it; the mapping ends with the process
            _log.debug("segment %s is still viewed at close", self.ref.name)
        os.close(self._descriptor)


class MemorySegment:
    """Memory of this process, found by name by readers in the same process."""

    _named: dict[str, "MemorySegment"] = {}

    def __init__(self, ref: SegmentRef, view: memoryview) -> None:
        self.ref = ref
        self.view = view

    @classmethod
    def create(cls, name: str, num_slots: int, slot_bytes: int) -> "MemorySegment":
        """Make a segment under a name that is not in use."""
        if name in cls._named:
            raise ConfigError(f"memory segment {name!r} exists already")
        num_bytes = num_slots * slot_bytes
        ref = SegmentRef(backing="memory", name=name, num_bytes=num_bytes, num_slots=num_slots,
                         owner_pid=os.getpid())  # fmt: skip
        segment = cls(ref, memoryview(mmap.mmap(-1, num_bytes)))
        cls._named[name] = segment
        return segment

    @classmethod
    def attach(cls, ref: SegmentRef) -> "MemorySegment":
        """Find the owner's segment."""
        owner = cls._named.get(ref.name)
        if owner is None or owner.ref.num_bytes != ref.num_bytes:
            raise SegmentError(f"memory segment {ref.name!r} is not of this process")
        return cls(ref, owner.view)

    def close(self) -> None:
        """Forget the name if it is the owner's."""
        if self._named.get(self.ref.name) is self:
            del self._named[self.ref.name]


BACKINGS: dict[str, type[HostSegment] | type[MemorySegment]] = {
    "host": HostSegment,
    "memory": MemorySegment,
}


def attach(ref: SegmentRef) -> Segment:
    """Map the segment a Welcome names."""
    backing = BACKINGS.get(ref.backing)
    if backing is None:
        raise LayoutMismatchError(f"segment {ref.name!r}: backing {ref.backing!r} is not known here")
    return backing.attach(ref)


def reclaim_dead_segments() -> int:
    """Remove ring segments whose owner is dead; return the bytes that came back."""
    reclaimed = 0
    for path in sorted(SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            _log.warning("segment %s is left alone: %s", path, error.strerror)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            num_bytes = os.fstat(descriptor).st_size
            path.unlink(missing_ok=True)
            reclaimed += num_bytes
            _log.warning("reclaimed segment %s of a dead owner: %d bytes", path, num_bytes)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
    return reclaimed


def _too_small(num_slots: int, slot_bytes: int) -> str:
    free = os.statvfs(SEGMENT_DIRECTORY)
    return (
        f"{SEGMENT_DIRECTORY} is too small: {num_slots} slots of {slot_bytes} bytes need "
        f"{num_slots * slot_bytes} bytes, got {free.f_bavail * free.f_frsize} free; lower "
        f"ring.num_slots or data.row_tokens, or give it more (containers: shm_size of the service "
        f"that owns the IPC namespace)"
    )
