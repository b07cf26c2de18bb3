"""Packs whole samples into rows of a fixed number of tokens: best fit among a few open rows.

    samples in order -> fullest open row with room -> a row that is full, or the fullest where the
    window has no room -> PackedRow

A sample is never split and rows never mix data epochs. The result is a function of the samples
and their order alone, so that after a restart the same sequence names the same row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from common.contracts.rows import DocumentSpan

PADDING_DOCUMENT = -1
PADDING_TOKEN = 0


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenized conversation."""

    sample_id: int
    """Its source << 40 | the number of its row there, from 0; in a file, its line less one."""
    tag: int
    """Number of its source's tag in the run's `DataManifest`."""
    token_ids: np.ndarray  # [length] int32
    loss_mask: np.ndarray  # [length] uint8
    part: int = 0
    """Which of the samples that its row of the file gives."""
    notes: tuple[str, ...] = ()
    """What is odd about it, as a rendered conversation has it."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The inputs of one row; everything behind `used_tokens` is padding."""

    sequence: int
    data_epoch: int
    documents: tuple[DocumentSpan, ...]
    token_ids: np.ndarray  # [T] int32
    document_ids: np.ndarray  # [T] int32, -1 on padding
    position_ids: np.ndarray  # [T] int32, from 0 in each document and once more in the padding
    loss_mask: np.ndarray  # [T] uint8
    used_tokens: int


@dataclass(frozen=True)
class RecordedRow:
    """A row that an earlier process published and that is made again only where it is wanted."""

    sequence: int
    make: Callable[[], PackedRow | None]
    """Returns the row, or None where a stop is asked for first."""


class Sized(Protocol):
    """What packing needs of a sample: its length."""

    def __len__(self) -> int: ...


SizedT = TypeVar("SizedT", bound=Sized)


@dataclass
class OpenRow(Generic[SizedT]):
    """Samples that lie in one row so far."""

    samples: list[SizedT] = field(default_factory=list)
    used_tokens: int = 0


class Packer(Generic[SizedT]):
    """Puts each sample into the fullest open row that has room for it (best fit).

    At most `window` rows are open. Where none has room, the fullest leaves as it is and makes
    place for a fresh one. Each `add` closes at most one row, so that the state between two of
    them, `open_rows`, is all there is to go on from.
    """

    def __init__(self, row_tokens: int, max_documents: int, window: int) -> None:
        self._row_tokens = row_tokens
        self._max_documents = max_documents
        self._window = window
        self.open_rows: list[OpenRow[SizedT]] = []

    def add(self, sample: SizedT) -> list[SizedT] | None:
        """Place a sample; return the samples of the row that this closes, if any."""
        length = len(sample)
        if length == self._row_tokens or self._max_documents == 1:
            return [sample]
        room = self._row_tokens - length
        fitting = [row for row in self.open_rows if row.used_tokens <= room]
        if fitting:
            row = max(fitting, key=_fullness)
            row.samples.append(sample)
            row.used_tokens += length
            is_full = row.used_tokens == self._row_tokens
            return self._close(row) if is_full or self._is_crowded(row) else None
        closed = None
        if len(self.open_rows) == self._window:
            closed = self._close(max(self.open_rows, key=_fullness))
        self.open_rows.append(OpenRow([sample], length))
        return closed

    def drain(self) -> list[SizedT] | None:
        """Close the oldest open row, at the end of the samples; None where none is left."""
        return self._close(self.open_rows[0]) if self.open_rows else None

    def restore(self, rows: list[list[SizedT]]) -> None:
        """Take up where another packer was, by the samples of its open rows."""
        self.open_rows = [OpenRow(samples, sum(map(len, samples))) for samples in rows]

    def _is_crowded(self, row: OpenRow[SizedT]) -> bool:
        return len(row.samples) == self._max_documents

    def _close(self, row: OpenRow[SizedT]) -> list[SizedT]:
        # By identity: rows of the same samples would be equal.
        self.open_rows = [other for other in self.open_rows if other is not row]
        return row.samples


def _fullness(row: OpenRow[SizedT]) -> int:
    return row.used_tokens


def pack(packer: Packer[SizedT], samples: Iterable[SizedT]) -> Iterator[list[SizedT]]:
    """Yield the samples of each row, until the samples end and no row is open."""
    for sample in samples:
        closed = packer.add(sample)
        if closed is not None:
            yield closed
    while (closed := packer.drain()) is not None:
        yield closed


def make_row(samples: list[Sample], row_tokens: int, sequence: int, data_epoch: int) -> PackedRow:
    """Lay samples side by side and pad the rest."""
    used = sum(map(len, samples))
    token_ids = np.full(row_tokens, PADDING_TOKEN, dtype=np.int32)
    document_ids = np.full(row_tokens, PADDING_DOCUMENT, dtype=np.int32)
    # Padding counts up too: to a target it is one more document, to a drafter it is nothing.
    position_ids = np.arange(-used, row_tokens - used, dtype=np.int32)
    loss_mask = np.zeros(row_tokens, dtype=np.uint8)
    documents = []
    start = 0
    for number, sample in enumerate(samples):
        span = slice(start, start + len(sample))
        token_ids[span] = sample.token_ids
        document_ids[span] = number
        position_ids[span] = np.arange(len(sample))
        loss_mask[span] = sample.loss_mask
        documents.append(
            DocumentSpan(
                sample_id=sample.sample_id, tag=sample.tag, start=start, length=len(sample)
            )
        )
        start += len(sample)
    return PackedRow(
        sequence=sequence,
        data_epoch=data_epoch,
        documents=tuple(documents),
        token_ids=token_ids,
        document_ids=document_ids,
        position_ids=position_ids,
        loss_mask=loss_mask,
        used_tokens=used,
    )
