"""A consumer's lease: what may be copied, and how a copy is checked."""

from typing import Protocol

import xxhash

from common.contracts.ring_messages import Descriptor, NackReason
from common.errors import CorruptSlotError
from common.ring.layout import PAGE_BYTES, SlotHeader, SlotLayout, unpack_header


class LeaseHolder(Protocol):
    """Whoever answers the owner for a lease."""

    def finish(self, lease: "Lease", reason: NackReason | None) -> None:
        """End the lease."""


class Lease:
    """The timed right to copy one slot; ends with `release` or `nack`."""

    def __init__(
        self, holder: LeaseHolder, descriptor: Descriptor, view: memoryview, layout: SlotLayout
    ) -> None:
        self._holder = holder
        self._layout = layout
        self.descriptor = descriptor
        self.view = view

    def field(self, name: str) -> memoryview:
        """Return the bytes of a field in the slot; they may change once the lease is over."""
        field = self._layout.fields[name]
        return self.view[field.offset : field.offset + field.num_bytes]

    def header(self) -> SlotHeader:
        """Read the slot's header."""
        return unpack_header(bytes(self.view[:PAGE_BYTES]))

    def is_intact(self, token_ids: bytes | memoryview) -> bool:
        """Compare the header with the descriptor after the copy (R1), and the copied tokens' hash.

        Args:
            token_ids: the copy of the field `token_ids`, not the slot's.
        """
        try:
            header = self.header()
        except CorruptSlotError:
            return False
        told = self.descriptor
        return (
            header.ring_epoch == told.ring_epoch
            and header.slot == told.lease.slot
            and header.generation == told.lease.generation
            and header.sequence == told.sequence
            and header.schema_fingerprint == self._layout.schema.fingerprint
            and xxhash.xxh3_64_intdigest(token_ids) == told.token_hash
        )

    def is_payload_intact(self, payload: bytes | memoryview) -> bool:
        """Check a copied payload against the header's checksum, where there is one."""
        expected = self.header().payload_hash
        return expected == 0 or xxhash.xxh3_64_intdigest(payload) == expected

    def release(self) -> None:
        """The copy is done: free the slot. The staging buffer stays busy."""
        self._holder.finish(self, None)

    def nack(self, reason: NackReason) -> None:
        """The row was not copied: give it back. The staging buffer is free again."""
        self._holder.finish(self, reason)
