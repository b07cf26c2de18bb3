"""Rows into staging buffers, ahead of the step.

    prefetch thread  acquire -> copy -> verify -> release    waits for: a free buffer, a lease
    main thread      next_row -> ... -> give_back            waits for: a staged row (bounded)
    unblocked by     prefetch: give_back, a descriptor, close;  main: a staged row, a failure

A slot is released when its copy is done and verified, not when the row is trained.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.contracts.ring_messages import NackReason
from common.errors import PeerLostError
from common.ring.consumer import RingConsumer
from common.ring.layout import SlotLayout
from common.ring.lease import Lease
from common.tensors import RowBuffers

POLL_SECONDS = 0.2
SILENCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedRow:
    """A staged row, ready to train on until it is given back."""

    sequence: int
    used_tokens: int
    buffers: RowBuffers


class RowFeed:
    """Stages rows of one ring into a fixed set of buffers."""

    def __init__(
        self,
        consumer: RingConsumer,
        layout: SlotLayout,
        buffers: list[RowBuffers],
        *,
        target_timeout_seconds: float,
        stream_is_over: Callable[[], bool],
    ) -> None:
        self._consumer = consumer
        self._layout = layout
        self._timeout = target_timeout_seconds
        self._stream_is_over = stream_is_over
        self.is_over = False
        """The target server has ended, and every row of the run is committed."""
        self._free: queue.Queue[RowBuffers] = queue.Queue()
        for entry in buffers:
            self._free.put(entry)
        self._staged: queue.Queue[StagedRow] = queue.Queue()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self.num_rejected = 0
        on_cuda = buffers[0].token_ids.device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_cuda else None
        self._token_ids = torch.empty_like(buffers[0].token_ids, device="cpu", pin_memory=on_cuda)
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
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._free.put(row.buffers)
        self._consumer.return_buffer()

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
                self._stage_next()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self._failure = error

    def _stage_next(self) -> None:
        try:
            buffers = self._free.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        lease = self._consumer.acquire(POLL_SECONDS)
        if lease is None:
            self._free.put(buffers)
            self._check_target()
            return
        fault = self._copy(lease, buffers)
        if fault is None:
            lease.release()
            told = lease.descriptor
            self._staged.put(StagedRow(told.sequence, told.used_tokens, buffers))
        else:
            self.num_rejected += 1
            _log.warning("row %d: %s copy dropped", lease.descriptor.sequence, fault)
            lease.nack(fault)
            self._free.put(buffers)

    def _copy(self, lease: Lease, buffers: RowBuffers) -> NackReason | None:
        """Copy a slot; return what is wrong with the copy, or None.

        A torn copy means that the lease is over: its nack is stale and costs no attempt.
        """
        with torch.cuda.stream(self._stream):  # no stream: a no-op on the CPU
            buffers.copy_from_slot(self._layout, lease.memory)
            # The hash is of the copy, not of the slot.
            self._token_ids.copy_(buffers.token_ids, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        # SYNC POINT (R1): the header is read after the copy; only then is the copy believed.
        if not lease.is_intact(memoryview(self._token_ids.numpy()).cast("B")):
            return "torn"
        return None if lease.is_payload_intact() else "corrupt"

    def _check_target(self) -> None:
        silent = self._consumer.silent_seconds
        if silent > SILENCE_SECONDS and not self.is_over:
            self.is_over = self._stream_is_over()
        if silent > self._timeout and not self.is_over and not self._consumer.is_drained:
            raise PeerLostError(
                f"target server: nothing heard for {silent:.0f} s, expected at most "
                f"{self._timeout:.0f}; see its log, or raise training.target_timeout_seconds"
            )
