"""One slot's bytes in this process, whatever memory they lie in.

    owner    invalidate -> (payload) -> publish_header      R1: generation 0, payload, header
    reader   (copy) -> read_header -> compare               R1: the check that counts is after the copy

`view` is the slot itself where the CPU can reach it. With GPU memory it is a copy of the slot's
head (header page and the small fields, all but hidden states) that `publish_header` sends along.
"""

import threading
from typing import Protocol

from common.ring.layout import PAGE_BYTES

_turnstile = threading.Lock()
_EMPTY_PAGE = bytes(PAGE_BYTES)


class SlotMemory(Protocol):
    """The bytes of one slot."""

    address: int
    """Of the slot's first byte: a host address, or a device address where `gpu` is set."""
    gpu: int | None
    """CUDA device ordinal in this process of the memory at `address`; None for host memory."""
    view: memoryview

    def invalidate(self) -> None:
        """Set the generation to 0; done on return, before the first byte of a new payload."""

    def publish_header(self, header: bytes) -> None:
        """Write what `view` holds of the payload, then the header; done on return."""

    def read_header(self) -> bytes:
        """Return the header page as it is in the slot at this moment."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the slot itself."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the slot itself; done on return."""


class HostSlot:
    """A slot that the CPU reads and writes in place."""

    gpu: int | None = None

    def __init__(self, view: memoryview, address: int, keeper: object = None) -> None:
        self.view = view
        self.address = address
        self._keeper = keeper
        """Keeps the mapping for as long as this slot is held."""

    def invalidate(self) -> None:
        """Zero the header page, before any later store of this thread."""
        self.view[:PAGE_BYTES] = _EMPTY_PAGE
        fence()

    def publish_header(self, header: bytes) -> None:
        """Write the header behind every earlier store of this thread."""
        fence()
        self.view[: len(header)] = header

    def read_header(self) -> bytes:
        """Read the header behind every earlier load of this thread."""
        fence()
        return bytes(self.view[:PAGE_BYTES])

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the slot."""
        return bytes(self.view[offset : offset + num_bytes])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the slot."""
        self.view[offset : offset + len(data)] = data


def fence() -> None:
    """Order this thread's loads and stores before the call against those after it (R1).

    A lock's atomics are the only fence Python has: on x86 one is a full barrier, on Arm an unlock
    followed by a lock is.
    """
    with _turnstile:
        pass
    with _turnstile:
        pass
