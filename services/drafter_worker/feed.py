"""Rows into staging buffers, ahead of the step.

    prefetch thread  acquire -> copy -> verify -> release    waits for: a free buffer, a lease
    main thread      next_row -> ... -> give_back            waits for: a staged row (bounded)
    unblocked by     prefetch: give_back, a descriptor, close;  main: a staged row, a failure

A slot is released when its copy is done and verified, not when the row is trained.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.ring.worker_rings import WorkerRings
from common.tensors import RowBuffers, RowCopier, RowCopy, StagingBuffers

POLL_SECONDS = 0.2
COPIES_UNDER_WAY = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedRow:
    """A staged row, ready to train on until it is given back."""

    sequence: int
    used_tokens: int
    staging: StagingBuffers

    @property
    def buffers(self) -> RowBuffers:
        """The row's tensors."""
        return self.staging.row


class RowFeed:
    """Stages rows of a worker's rings into a fixed set of buffers, whichever ring they are from."""

    def __init__(
        self,
        rings: WorkerRings,
        buffers: list[StagingBuffers],
        *,
        check_targets: Callable[[], None],
    ) -> None:
        self._rings = rings
        self._check_targets = check_targets
        self._free: queue.Queue[StagingBuffers] = queue.Queue()
        for entry in buffers:
            self._free.put(entry)
        self._staged: queue.Queue[StagedRow] = queue.Queue()
        self._copies: deque[RowCopy] = deque()
        """Copies under way; the prefetch thread's alone."""
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self.num_rejected = 0
        self._copier = RowCopier(buffers[0].row.token_ids.device)
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next_row(self, timeout: float) -> StagedRow | None:
        """Return the next staged row, or None where none comes within `timeout`."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._staged.get(timeout=timeout)
        except queue.Empty:
            return None

    def give_back(self, row: StagedRow) -> None:
        """The row's buffers may be filled again."""
        self._copier.wait_for_readers()
        self._free.put(row.staging)
        self._rings.return_buffer(row.sequence)

    @property
    def has_staged(self) -> bool:
        """Whether a row waits for the main thread."""
        return not self._staged.empty()

    def close(self) -> None:
        """Stop the thread; staged rows are dropped and trained again by others."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                # The next copy is under way before the last one is waited for.
                has_begun = self._begin_copy()
                if self._copies and not (has_begun and len(self._copies) < COPIES_UNDER_WAY):
                    self._end_copy(self._copies.popleft())
            while self._copies:
                self._end_copy(self._copies.popleft())
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self._failure = error

    def _begin_copy(self) -> bool:
        """Begin to copy a row into a free buffer; wait for both only where no copy is under way."""
        patience = 0.0 if self._copies else POLL_SECONDS
        try:
            buffers = self._free.get(timeout=patience)
        except queue.Empty:
            return False
        lease = self._rings.acquire(patience)
        if lease is None:
            self._free.put(buffers)
            self._check_targets()
            return False
        self._copies.append(self._copier.start(lease, buffers))
        return True

    def _end_copy(self, copy: RowCopy) -> None:
        fault, lease = copy.finish(), copy.lease
        if fault is None and lease.release():
            used_tokens = lease.descriptor.used_tokens
            self._staged.put(StagedRow(lease.sequence, used_tokens, copy.buffers))
        elif fault is None:
            _log.info("row %d: its lease has ended during the copy; it comes again", lease.sequence)
            self._free.put(copy.buffers)
        else:
            self.num_rejected += 1
            _log.warning("row %d: %s copy dropped", lease.sequence, fault)
            lease.nack(fault)
            self._free.put(copy.buffers)
