"""A producer's loan of a slot: where a row is written, and the two ways it ends."""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from common.contracts.rows import DocumentSpan, Split
from common.errors import CorruptSlotError, SlotStateError
from common.ring.book import PublishedRow
from common.ring.layout import SlotLayout, pack_documents
from common.ring.slot_memory import SlotMemory


class SlotHolder(Protocol):
    """Whoever lent the slot."""

    layout: SlotLayout

    def publish_slot(
        self, slot: int, memory: SlotMemory, row: PublishedRow, documents: int
    ) -> None:
        """Write the header and announce the row; where this raises, nothing was announced."""

    def abort_slot(self, slot: int) -> None:
        """Take the slot back unwritten."""


class WritableSlot:
    """The right to write one slot; ends with `publish` or `abort`. An exception aborts."""

    def __init__(self, holder: SlotHolder, slot: int, memory: SlotMemory) -> None:
        self._holder = holder
        self._is_open = True
        self.slot = slot
        self.memory = memory

    def field(self, name: str) -> memoryview:
        """Return a field's bytes, to be written; of a slot in GPU memory only the small fields'."""
        field = self._holder.layout.fields[name]
        view = self.memory.view[field.offset : field.offset + field.num_bytes]
        if len(view) != field.num_bytes:
            raise SlotStateError(
                f"slot {self.slot}, field {name!r} is in GPU memory: write it through its address"
            )
        return view

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Fill a field from host bytes, wherever the slot lies."""
        field = self._holder.layout.fields[name]
        if len(data) != field.num_bytes:
            raise CorruptSlotError(
                f"slot {self.slot}, field {name!r}: got {len(data)} bytes, expected "
                f"{field.num_bytes}; the field is not written"
            )
        self.memory.write(field.offset, data)

    def publish(
        self,
        *,
        sequence: int,
        split: Split,
        used_tokens: int,
        documents: Sequence[DocumentSpan],
    ) -> None:
        """WRITING -publish-> PUBLISHED: write the header last, then announce."""
        if not self._is_open:
            raise SlotStateError(f"slot {self.slot}: published or aborted already; loan another")
        layout = self._holder.layout
        try:
            _check_bounds(layout, sequence, used_tokens, len(documents))
            table = pack_documents(documents)
            self.field("documents")[: len(table)] = table
            row = PublishedRow(
                sequence,
                split,
                used_tokens,
                layout.payload_bytes,
                layout.hash_tokens(self.memory.view),
            )
            self._holder.publish_slot(self.slot, self.memory, row, len(documents))
        except BaseException:
            self.abort()
            raise
        self._is_open = False

    def abort(self) -> None:
        """WRITING -abort-> FREE."""
        if self._is_open:
            self._is_open = False
            self._holder.abort_slot(self.slot)

    def __enter__(self) -> "WritableSlot":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def _check_bounds(layout: SlotLayout, sequence: int, used_tokens: int, documents: int) -> None:
    """Refuse what no message or header can carry, before anything of it is written."""
    for name, value, most in (
        ("sequence", sequence, (1 << 64) - 1),
        ("used_tokens", used_tokens, layout.schema.row_tokens),
        ("documents", documents, layout.schema.max_documents),
    ):
        if type(value) is not int or not 0 <= value <= most:
            raise CorruptSlotError(
                f"row {sequence!r}: {name} got {value!r}, expected an int from 0 to {most}; "
                f"the row is not published"
            )
