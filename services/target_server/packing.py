"""Packs whole samples into rows of a fixed number of tokens: first fit among a few open rows.

    samples in order -> first open row with room -> a row that is full, or the fullest where the
    window has no room -> PackedRow number 0, 1, 2, ...

A sample is never split and rows never mix data epochs. The result is a function of the samples
and their order alone, so that after a restart the same sequence names the same row.
"""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from common.contracts.rows import DocumentSpan
from common.contracts.sequences import ONE_RING, Shard
from services.target_server.data_config import DataTable

PADDING_DOCUMENT = -1
PADDING_TOKEN = 0


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenized conversation."""

    sample_id: int
    """Number of its line in the file, from 0; blank lines do not count."""
    tag: int
    token_ids: np.ndarray  # [length] int32
    loss_mask: np.ndarray  # [length] uint8
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


class SampleSource(Protocol):
    """Where samples come from."""

    def __len__(self) -> int:
        """Return the number of conversations, usable or not."""

    def samples(self, data_epoch: int) -> Iterator[Sample]:
        """Yield the usable samples of one pass, in its order."""

    def order(self, data_epoch: int) -> list[int]:
        """Return the sample ids of one pass, usable or not, in its order."""


class RowStream:
    """The rows of a run, by sequence."""

    def __init__(self, source: SampleSource, table: DataTable) -> None:
        self._source = source
        self._table = table

    def rows(self, shard: Shard = ONE_RING) -> Iterator[PackedRow]:
        """Yield the rows of one ring, by sequence; all are packed, and those of others dropped."""
        sequence = 0
        for data_epoch in range(self._table.data_epochs):
            for samples in self._pack(self._source.samples(data_epoch)):
                if shard.holds(sequence):
                    yield make_row(samples, self._table.row_tokens, sequence, data_epoch)
                sequence += 1

    def count_rows(self) -> int | None:
        """Return how many rows there will be, or None where counting would keep the run waiting."""
        if len(self._source) > self._table.count_ahead_conversations:
            return None
        lengths: dict[int, list[int]] = {}
        for sample in self._source.samples(0):
            lengths.setdefault(sample.sample_id, []).append(len(sample))
        count = 0
        for data_epoch in range(self._table.data_epochs):
            usable = (n for i in self._source.order(data_epoch) for n in lengths.get(i, ()))
            # A range stands for a sample of its length.
            count += sum(1 for _ in self._pack(map(range, usable)))
        return count

    def _pack(self, samples: Iterable["SizedT"]) -> Iterator[list["SizedT"]]:
        table = self._table
        return first_fit(samples, table.row_tokens, table.max_documents, table.packing_window)


SizedT = TypeVar("SizedT", bound=Sized)


@dataclass
class _OpenRow(Generic[SizedT]):
    samples: list[SizedT] = field(default_factory=list)
    used_tokens: int = 0


def first_fit(
    samples: Iterable[SizedT], row_tokens: int, max_documents: int, window: int
) -> Iterator[list[SizedT]]:
    """Yield the samples of each row; at most `window` rows are open at a time."""
    open_rows: list[_OpenRow[SizedT]] = []
    for sample in samples:
        room = row_tokens - len(sample)
        row = next((row for row in open_rows if row.used_tokens <= room), None)
        if row is None:
            if len(open_rows) == window:
                fullest = max(open_rows, key=lambda row: row.used_tokens)
                open_rows.remove(fullest)
                yield fullest.samples
            row = _OpenRow()
            open_rows.append(row)
        row.samples.append(sample)
        row.used_tokens += len(sample)
        if row.used_tokens == row_tokens or len(row.samples) == max_documents:
            open_rows.remove(row)
            yield row.samples
    for row in open_rows:
        yield row.samples


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
