"""A producer's loan of a slot: where a row is written, and the two ways it ends."""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from common.contracts.rows import DocumentSpan, Split
from common.errors import CorruptSlotError, SlotStateError
from common.ring.book import PublishedRow
from common.ring.layout import SlotLayout, pack_documents


class SlotHolder(Protocol):
    """Whoever lent the slot."""

    layout: SlotLayout

    def publish_slot(self, slot: int, view: memoryview, row: PublishedRow, documents: int) -> None:
        """Write the header and announce the row; where this raises, nothing was announced."""

    def abort_slot(self, slot: int) -> None:
        """Take the slot back unwritten."""


class WritableSlot:
    """The right to write one slot; ends with `publish` or `abort`. An exception aborts."""

    def __init__(self, holder: SlotHolder, slot: int, view: memoryview) -> None:
        self._holder = holder
        self._is_open = True
        self.slot = slot
        self.view = view

    def field(self, name: str) -> memoryview:
        """Return the bytes of a field."""
        field = self._holder.layout.fields[name]
        return self.view[field.offset : field.offset + field.num_bytes]

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
                sequence, split, used_tokens, layout.payload_bytes, layout.hash_tokens(self.view)
            )
            self._holder.publish_slot(self.slot, self.view, row, len(documents))
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
    limits = {
        "sequence": (sequence, (1 << 64) - 1),
        "used_tokens": (used_tokens, layout.schema.row_tokens),
        "documents": (documents, layout.schema.max_documents),
    }
    for name, (value, most) in limits.items():
        if type(value) is not int or not 0 <= value <= most:
            raise CorruptSlotError(
                f"row {sequence!r}: {name} got {value!r}, expected an int from 0 to {most}; "
                f"the row is not published"
            )
