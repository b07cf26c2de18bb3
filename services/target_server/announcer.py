"""Publishes captured rows as soon as their copies are done.

    main thread       capture n+1 -> submit           waits for: room in the queue
    announcer thread  copies of n done -> publish     waits for: a row, its copies
    unblocked by      submit: a publish, a failure;  announcer: a row, close

The target computes the next row while the last one is still being copied into its slot.
"""

import queue
import threading
from collections import Counter
from types import TracebackType
from typing import Protocol

from common.ring.owner import WritableSlot
from services.target_server.packing import PackedRow

# Rows whose copies are under way, beside the one that the target computes.
DEPTH = 1


class Copies(Protocol):
    """What fills a slot."""

    def wait(self) -> None:
        """Return when the slot holds the whole row; raise where the row must not be published."""


class Announcer:
    """Publishes in the order of `submit`. After a failure nothing is published any more."""

    def __init__(self) -> None:
        self._rows: queue.Queue[tuple[WritableSlot, PackedRow, Copies] | None] = queue.Queue(DEPTH)
        self._failure: BaseException | None = None
        self.num_rows = 0
        self.num_tokens = 0
        self.tokens_by_tag: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def submit(self, slot: WritableSlot, row: PackedRow, copies: Copies) -> None:
        """Hand over a loaned slot that is being filled; raise what an earlier row failed with."""
        self._rows.put((slot, row, copies))
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what publishing failed with, if it did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Publish what was submitted, then stop."""
        self._rows.put(None)
        self._thread.join()

    def __enter__(self) -> "Announcer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while (entry := self._rows.get()) is not None:
            slot, row, copies = entry
            with slot:  # aborts what is not published
                if self._failure is None:
                    self._publish(slot, row, copies)

    def _publish(self, slot: WritableSlot, row: PackedRow, copies: Copies) -> None:
        try:
            copies.wait()
            slot.publish(
                sequence=row.sequence,
                split="train",
                used_tokens=row.used_tokens,
                documents=row.documents,
            )
            self.num_rows += 1
            self.num_tokens += row.used_tokens
            for document in row.documents:
                self.tokens_by_tag[document.tag] += document.length
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self._failure = error
