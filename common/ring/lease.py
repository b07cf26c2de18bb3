"""A consumer's lease: what may be copied, and how a copy is checked."""

from typing import Protocol

import xxhash

from common.contracts.ring_messages import Descriptor, NackReason
from common.contracts.sequences import Shard
from common.errors import CorruptSlotError
from common.ring.layout import PAGE_BYTES, SlotHeader, SlotLayout, unpack_header
from common.ring.slot_memory import SlotMemory


class LeaseHolder(Protocol):
    """Whoever answers the owner for a lease."""

    shard: Shard

    def finish(self, lease: "Lease", reason: NackReason | None) -> bool:
        """End the lease and say whether its copy is to be trained on; a second time does nothing."""


class Lease:
    """The timed right to copy one slot; ends with `release` or `nack`."""

    def __init__(
        self, holder: LeaseHolder, descriptor: Descriptor, memory: SlotMemory, layout: SlotLayout
    ) -> None:
        self._holder = holder
        self._layout = layout
        self.descriptor = descriptor
        self.memory = memory
        self.is_open = True
        """Until the first `release` or `nack`; the holder's to change."""

    def read(self, name: str) -> bytes:
        """Return a copy of a field's bytes."""
        field = self._layout.fields[name]
        return self.memory.read(field.offset, field.num_bytes)

    @property
    def sequence(self) -> int:
        """The row's sequence in the run; the descriptor's is its number in the ring."""
        return self._holder.shard.to_global(self.descriptor.sequence)

    def header(self) -> SlotHeader:
        """Read the slot's header; raise `CorruptSlotError` where a writer is at work."""
        return unpack_header(self.memory.read_header())

    def is_intact(self, token_ids: bytes | memoryview, page: memoryview | None = None) -> bool:
        """Compare the header with the descriptor after the copy (R1), and the copied tokens' hash.

        Args:
            token_ids: the copy of the field `token_ids`, not the slot's.
            page: the header page where the copy's own stream has read it behind the payload;
                without it the page is read now.
        """
        told = self.descriptor.token_hash
        is_same = self._matching_header(page) is not None
        return is_same and xxhash.xxh3_64_intdigest(token_ids) == told

    def is_payload_intact(self, page: memoryview | None = None) -> bool:
        """Check the slot's payload against the header's checksum, where the owner writes one."""
        header = self._matching_header(page)
        if header is None:
            return False
        if header.payload_hash == 0:
            return True
        # A slot with a checksum is in host memory: its view is all of it.
        return xxhash.xxh3_64_intdigest(self.memory.view[PAGE_BYTES:]) == header.payload_hash

    def release(self) -> bool:
        """The copy is done: free the slot.

        Returns:
            Whether the copy is to be trained on, and its staging buffer stays busy. False where the
            session has ended during the copy: the buffer is free again, and the row comes again.
        """
        return self._holder.finish(self, None)

    def nack(self, reason: NackReason) -> None:
        """The row was not copied: give it back. The staging buffer is free again."""
        self._holder.finish(self, reason)

    def _matching_header(self, page: memoryview | None) -> SlotHeader | None:
        # SYNC POINT (R1): the copy is over before the header is read.
        try:
            header = self.header() if page is None else unpack_header(page)
        except CorruptSlotError:
            return None
        told = self.descriptor
        is_same = (
            header.ring_epoch == told.ring_epoch
            and header.slot == told.lease.slot
            and header.generation == told.lease.generation
            and header.sequence == told.sequence
            and header.schema_fingerprint == self._layout.fingerprint
        )
        return header if is_same else None
