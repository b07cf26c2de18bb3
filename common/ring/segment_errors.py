"""What is said where shared memory cannot be had or is taken away: which file, why, what to do."""

import contextlib
import errno
import os
from pathlib import Path

_REMOVERS = (
    "an rm, a cleaner of /dev/shm, or logind's RemoveIPC, which removes a user's files there at "
    "the end of the last login: RemoveIPC=no in logind.conf, or `loginctl enable-linger`"
)


def is_gone(path: Path) -> str:
    """Say what an owner does that finds its own file removed."""
    return (
        f"segment {path}: its file was removed while its ring was open, expected it there until the "
        f"target server ends ({_REMOVERS}); no worker can attach any more, so this target server "
        f"ends; start it again and it makes a new ring"
    )


def cannot_open(path: Path, owner_pid: int, error: OSError) -> str:
    """Say why a reader cannot open an owner's file."""
    if error.errno == errno.ELOOP:
        return (
            f"segment {path}: got a link to {_target(path)}, expected a target server's own file; no "
            f"link is followed, remove it"
        )
    said = f"segment {path}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and _has_open_and_removed(owner_pid, path.name):
        return (
            f"{said}; its file was removed while its ring was open ({_REMOVERS}); the target server "
            f"makes a new ring when it starts again"
        )
    return (
        f"{said}; worker and target server must share /dev/shm (containers: ipc of one service), "
        f"and nothing else may remove the file"
    )


def cannot_create(path: Path, error: OSError) -> str:
    """Say why an owner cannot make its file, whatever the kernel has against it."""
    advice = _ADVICE.get(error.errno or 0, "mount a tmpfs there that this user can write")
    return (
        f"segment {path}: {error.strerror}, expected a tmpfs in which uid {os.geteuid()} can make a "
        f"file of its own; {advice}"
    )


_ALLOW = (
    "give the folder mode 1777, as /dev/shm has it, or run as a user that can write it (containers: "
    "check the user and the security profile of the service)"
)
_ADVICE = {
    errno.EROFS: "mount it for writing: `mount -o remount,rw /dev/shm` (containers: a read-only root "
    "needs a tmpfs at /dev/shm, or ipc of a service that has one)",
    errno.ENOSPC: "no inode is left there: remove files that nobody needs, or raise its nr_inodes "
    "(`mount -o remount,nr_inodes=1024 /dev/shm`)",
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "close programs that hold many files, or raise fs.file-max",
    errno.ENOMEM: "free memory, or lower ring.num_slots or data.row_tokens",
}


def too_small(directory: Path, num_slots: int, slot_bytes: int) -> str:
    """Say how many bytes a ring needs, and how many there are."""
    status = os.statvfs(directory)
    return (
        f"{directory} is too small: {num_slots} slots of {slot_bytes} bytes need "
        f"{num_slots * slot_bytes} bytes, got {status.f_bavail * status.f_frsize} free of "
        f"{status.f_blocks * status.f_frsize}; lower ring.num_slots or data.row_tokens, or give it "
        f"more (containers: shm_size of the service that owns the IPC namespace)"
    )


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return repr(str(link.readlink()))
    return "somewhere"


def _has_open_and_removed(pid: int, name: str) -> bool:
    """Whether a process has a file of this name open that is in no folder any more.

    False as well where the process cannot be looked at, as in another PID namespace.
    """
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if entry.readlink().name == f"{name} (deleted)":
                    return True
    return False
