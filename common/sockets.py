"""Sockets in the file system that their owner alone can use."""

import secrets
from pathlib import Path

import zmq


def bind_private(socket: "zmq.Socket[bytes]", path: Path) -> int:
    """Bind at a path; return the inode of the socket's file, whose mode is 0600.

    It is bound beside the path, restricted, then moved into place: nobody finds it half made. What
    lies at the path is replaced, so the caller holds a lock that says it has no live owner.
    """
    beside = path.with_name(f".{secrets.token_hex(4)}")
    try:
        socket.bind(f"ipc://{beside}")
        beside.chmod(0o600)
        inode = beside.stat().st_ino
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return inode
