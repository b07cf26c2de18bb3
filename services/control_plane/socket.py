"""The control plane's end of `<run_dir>/control.sock`: heartbeats in, replies out.

    consumes    heartbeats and goodbyes of every service
    produces    a reply to each heartbeat that the registry takes
    waits for   a message or `close()`
    unblocked   by its timeout, always

No message ends this thread: what cannot be decoded is counted by reason and dropped.
"""

import os
import threading
from pathlib import Path

import zmq

from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.control_messages import CONTROL_PLANE_DECODER, ServiceHeartbeat
from common.errors import MessageError
from common.sockets import bind_private
from services.control_plane.registry import Registry

_POLL_MILLISECONDS = 1000
_JOIN_SECONDS = 5.0


class ControlSocket:
    """Feeds a registry from the socket in a thread of its own until `close`."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self._path = path
        self._registry = registry
        self._closing = threading.Event()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._router = _open_router(self._context, path)
        self._thread = threading.Thread(target=self._run, name="control-socket", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and remove the socket."""
        self._closing.set()
        os.eventfd_write(self._waker, 1)
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        self._router.close()
        self._context.term()
        self._path.unlink(missing_ok=True)  # libzmq leaves it
        os.close(self._waker)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        while not self._closing.is_set():
            if self._router in dict(poller.poll(_POLL_MILLISECONDS)):
                self._serve_one()

    def _serve_one(self) -> None:
        try:
            peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                raise MessageError("malformed", f"got {len(frames)} frames, expected 1")
            message = CONTROL_PLANE_DECODER.decode(frames[0])
        except zmq.Again:
            return
        except MessageError as error:
            self._registry.refuse(error.reason)
            return
        if not isinstance(message, ServiceHeartbeat):
            self._registry.take_goodbye(message)
            return
        reply = self._registry.take_heartbeat(message)
        if reply is not None:
            _send(self._router, peer, encode(reply))


def _open_router(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.set(zmq.LINGER, 0)
    # Over the codec's limit, so that it can count what is too large; libzmq drops the peer of
    # a message that is larger still.
    router.set(zmq.MAXMSGSIZE, 4 * MAX_MESSAGE_BYTES)
    bind_private(router, path)
    return router


def _send(router: zmq.Socket[bytes], peer: bytes, raw: bytes) -> None:
    try:
        router.send_multipart([peer, raw], zmq.NOBLOCK)
    except zmq.Again:  # it does not read; its next heartbeat is answered again
        return
