"""Memory that holds the slots: a file in /dev/shm (host), or this process's own (memory).

The one door to OS shared memory. A host segment is a file made with O_EXCL, mode 0600 and
posix_fallocate, so that a full /dev/shm is an error here and not a SIGBUS later. Its owner holds an
flock on it for life: a segment whose lock can be taken has no owner and is reclaimed at start-up.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from common.contracts.ring_messages import SegmentRef
from common.errors import ConfigError, LayoutMismatchError, SegmentError
from common.ring import cuda, segment_errors
from common.ring.slot_memory import HostSlot, SlotMemory

SEGMENT_DIRECTORY = Path("/dev/shm")
SEGMENT_PREFIX = "ringdraft-"
# How long a dead ring's memory may take to come back: its readers drop it within a heartbeat.
PATIENCE_SECONDS = 5.0
_NAME = re.compile(rf"{SEGMENT_PREFIX}[A-Za-z0-9._-]{{1,40}}-[0-9]+-[0-9a-f]{{8}}-[0-9a-f]{{16}}")
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
_log = logging.getLogger(__name__)


class Segment(Protocol):
    """One ring's memory in this process.

    Each backing has `create` (name, slots, their bytes; the owner) and `attach` (what a Welcome
    says; a reader). Memory outlives `close` for as long as a slot of it is held.
    """

    ref: SegmentRef

    def slot(self, index: int) -> SlotMemory:
        """Return one slot's bytes."""

    def is_removed(self) -> bool:
        """Whether the owner is gone, or is going, and nobody can attach any more."""

    def close(self) -> None:
        """Drop the mapping; an owner's close also removes the segment."""


class HostSegment:
    """A file in /dev/shm, mapped, and pinned where this process has a GPU."""

    def __init__(
        self, ref: SegmentRef, descriptor: int, *, is_owner: bool, gpu: int | None = None
    ) -> None:
        self.ref = ref
        self._path = SEGMENT_DIRECTORY / ref.name
        self.is_owner = is_owner
        self._mapping: _Mapping | None = _Mapping(mmap.mmap(descriptor, ref.num_bytes), gpu)
        self._descriptor = descriptor

    @classmethod
    def create(
        cls,
        name: str,
        num_slots: int,
        slot_bytes: int,
        *,
        head_bytes: int = 0,  # noqa: ARG003 - the CPU reaches all of a slot
        gpu: int | None = None,
    ) -> "HostSegment":
        """Make and lock a segment; raise `ConfigError` where it does not fit or may not be made."""
        try:
            return cls._create(name, num_slots, slot_bytes, gpu)
        except OSError as error:
            raise ConfigError(
                segment_errors.cannot_create(SEGMENT_DIRECTORY / name, error)
            ) from error

    @classmethod
    def _create(cls, name: str, num_slots: int, slot_bytes: int, gpu: int | None) -> "HostSegment":
        num_bytes = num_slots * slot_bytes
        require_room(num_slots, slot_bytes)
        path = SEGMENT_DIRECTORY / name
        descriptor = _create_locked(path)
        try:
            _allocate(descriptor, num_slots, slot_bytes)
            ref = SegmentRef(backing="host", name=name, num_bytes=num_bytes, num_slots=num_slots,
                             owner_pid=os.getpid())  # fmt: skip
            return cls(ref, descriptor, is_owner=True, gpu=gpu)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, ref: SegmentRef, gpu: int | None = None) -> "HostSegment":
        """Map an owner's segment; its name and size come from the wire and are checked."""
        if _NAME.fullmatch(ref.name) is None:
            raise LayoutMismatchError(f"segment name {ref.name!r} is not a ring's; message refused")
        path = SEGMENT_DIRECTORY / ref.name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(segment_errors.cannot_open(path, ref.owner_pid, error)) from error
        try:
            status = os.fstat(descriptor)
            if not _is_private(status):
                raise SegmentError(
                    f"segment {path}: got mode {stat.filemode(status.st_mode)} of uid "
                    f"{status.st_uid}, expected a file that uid {os.geteuid()} alone can use; it is "
                    f"no ring's, or worker and target server run as different users"
                )
            if status.st_size != ref.num_bytes:
                raise LayoutMismatchError(
                    f"segment {path}: got {status.st_size} bytes, expected {ref.num_bytes}"
                )
            return cls(ref, descriptor, is_owner=False, gpu=gpu)
        except BaseException:
            os.close(descriptor)
            raise

    def slot(self, index: int) -> HostSlot:
        """Return one slot's bytes; raise `SegmentError` after `close`."""
        if self._mapping is None:
            raise SegmentError(f"segment {self._path} is closed")
        return self._mapping.slot(index, self.ref.num_bytes // self.ref.num_slots)

    def is_removed(self) -> bool:
        """Whether the file is gone from /dev/shm: its owner closed it, or it was reclaimed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmap; the owner removes the file first, so no newcomer attaches to a dying ring."""
        if self._mapping is None:
            return
        if self.is_owner:
            self._path.unlink(missing_ok=True)
        self._mapping = None
        os.close(self._descriptor)


class MemorySegment:
    """Memory of this process, found by name by readers in the same process."""

    _named: dict[str, "MemorySegment"] = {}

    def __init__(self, ref: SegmentRef, mapping: "_Mapping") -> None:
        self.ref = ref
        self.mapping = mapping

    @classmethod
    def create(
        cls,
        name: str,
        num_slots: int,
        slot_bytes: int,
        *,
        head_bytes: int = 0,  # noqa: ARG003 - the CPU reaches all of a slot
        gpu: int | None = None,
    ) -> "MemorySegment":
        """Make a segment under a name that is not in use."""
        if name in cls._named:
            raise ConfigError(f"memory segment {name!r} exists already")
        num_bytes = num_slots * slot_bytes
        ref = SegmentRef(backing="memory", name=name, num_bytes=num_bytes, num_slots=num_slots,
                         owner_pid=os.getpid())  # fmt: skip
        segment = cls(ref, _Mapping(mmap.mmap(-1, num_bytes), gpu))
        cls._named[name] = segment
        return segment

    @classmethod
    def attach(cls, ref: SegmentRef, gpu: int | None = None) -> "MemorySegment":  # noqa: ARG003
        """Find the owner's segment."""
        owner = cls._named.get(ref.name)
        if owner is None or owner.ref.num_bytes != ref.num_bytes:
            raise SegmentError(f"memory segment {ref.name!r} is not of this process")
        return cls(ref, owner.mapping)

    def slot(self, index: int) -> HostSlot:
        """Return one slot's bytes."""
        return self.mapping.slot(index, self.ref.num_bytes // self.ref.num_slots)

    def is_removed(self) -> bool:
        """Whether the owner has closed it."""
        return self.ref.name not in self._named

    def close(self) -> None:
        """Forget the name if it is the owner's."""
        if self._named.get(self.ref.name) is self:
            del self._named[self.ref.name]


class _Mapping:
    """Mapped bytes; unpinned and unmapped when the segment and every slot of it are let go.

    A copy by the GPU may be under way when its ring ends: unpinning under it is an error of CUDA.
    """

    def __init__(self, memory: mmap.mmap, gpu: int | None) -> None:
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        num_pinned = 0
        if gpu is not None:
            cuda.use(gpu)
            cuda.register(self.address, len(memory))
            num_pinned = len(memory)
        weakref.finalize(self, _unmap, memory, self.view, self.address, num_pinned)

    def slot(self, index: int, slot_bytes: int) -> HostSlot:
        start = index * slot_bytes
        return HostSlot(self.view[start : start + slot_bytes], self.address + start, self)


def _unmap(memory: mmap.mmap, view: memoryview, address: int, num_pinned: int) -> None:
    """What is still viewed stays mapped until the last view of it is gone."""
    cuda.unregister(address, num_pinned)
    with contextlib.suppress(BufferError):
        view.release()
        memory.close()


def require_present(segment: Segment) -> None:
    """Raise `SegmentError` where an owner's segment was taken away under it."""
    if segment.is_removed():
        raise SegmentError(segment_errors.is_gone(SEGMENT_DIRECTORY / segment.ref.name))


def require_room(num_slots: int, slot_bytes: int) -> None:
    """Raise `ConfigError` where a ring is larger than all of /dev/shm, whatever is in it."""
    num_bytes = num_slots * slot_bytes
    if num_bytes > (_capacity_bytes() or num_bytes):  # 0: a tmpfs without a limit
        raise ConfigError(segment_errors.too_small(SEGMENT_DIRECTORY, num_slots, slot_bytes))


def reclaim_dead_segments() -> int:
    """Remove ring segments whose owner is dead; return the bytes that came back.

    What merely begins like a ring's name, what others than this user can use, and what a live owner
    has locked, is left alone.
    """
    reclaimed = 0
    for path, num_bytes in dead_segments():
        try:
            path.unlink()
        except OSError as error:  # gone since, or not this user's to remove
            _log.warning("segment %s is left alone: %s", path, error.strerror)
            continue
        reclaimed += num_bytes
        _log.warning("reclaimed segment %s of a dead owner: %d bytes", path, num_bytes)
    return reclaimed


def dead_segments() -> Iterator[tuple[Path, int]]:
    """Yield ring segments whose owner is dead, with their bytes; each is locked until the next."""
    for path in sorted(SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*")):
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            _log.warning("segment %s is left alone: %s", path, error.strerror)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if _is_private(status) and status.st_nlink > 0:
                yield path, status.st_size
        except BlockingIOError:
            continue
        except OSError as error:
            _log.warning("segment %s is left alone: %s", path, error.strerror)
        finally:
            os.close(descriptor)


def _is_private(status: os.stat_result) -> bool:
    """Whether it is a file as `_create_locked` makes them."""
    is_file = stat.S_ISREG(status.st_mode)
    return is_file and not status.st_mode & 0o077 and status.st_uid == os.geteuid()


def _create_locked(path: Path) -> int:
    """Return the descriptor of a file that this process made and locked."""
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError as error:
            raise ConfigError(
                f"segment {path} exists already: an older run's or another run's; stop that run, "
                f"or remove the file if no process of it is left"
            ) from error
        # Between its creation and its lock the file looks dead to another run that starts up.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor
        os.close(descriptor)


def _allocate(descriptor: int, num_slots: int, slot_bytes: int) -> None:
    """Reserve every page; wait a moment for what the readers of a dead ring still map."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            os.posix_fallocate(descriptor, 0, num_slots * slot_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if time.monotonic() >= deadline:
                raise ConfigError(
                    segment_errors.too_small(SEGMENT_DIRECTORY, num_slots, slot_bytes)
                ) from error
            time.sleep(0.1)  # noqa: TID251 - nobody can tell when a mapping of another process ends
        else:
            return


def _capacity_bytes() -> int:
    status = os.statvfs(SEGMENT_DIRECTORY)
    return status.f_blocks * status.f_frsize
