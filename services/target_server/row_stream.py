"""The packed rows of a run, by sequence, from its start or from a saved cursor.

    source (samples in order) -> Packer -> row number 0, 1, 2, ...
                 a cursor every `cursor_rows` rows -> Cursors

A row's sequence is its ordinal in a packing that is a function of the data, the config and the
seed; the rows after a resume are the rows that would have come.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from common.contracts.sequences import ONE_RING, Shard
from services.target_server.conversations import Place, SamplePass
from services.target_server.counts import SampleCounts
from services.target_server.cursors import Cursor, Cursors
from services.target_server.data_config import DataTable
from services.target_server.inputs.mixture import RowRef
from services.target_server.packing import PackedRow, Packer, Sample, make_row, pack

_log = logging.getLogger(__name__)


class SampleSource(Protocol):
    """Where samples come from."""

    @property
    def fingerprint(self) -> str:
        """Identity of the samples and their order."""

    @property
    def num_bytes(self) -> int:
        """Size of all rows of the files."""

    def samples(self, data_epoch: int, place: Place, counts: SampleCounts) -> SamplePass:
        """Return one pass over the usable samples, from `place` on; add to `counts`."""

    def rows(self, data_epoch: int) -> Iterator[RowRef]:
        """Return one pass over the rows, usable or not."""

    def maybe_samples(self, row: RowRef, counts: SampleCounts) -> list[Sample]:
        """Return the samples of a row, none where it is skipped."""

    def read_all(self, keys: Sequence[tuple[int, int]]) -> list[Sample]:
        """Return samples by (sample id, part), in the order of the keys."""


class RowStream:
    """The rows of a run."""

    def __init__(
        self, source: SampleSource, table: DataTable, cursors: Cursors | None = None
    ) -> None:
        self._source = source
        self._table = table
        self._cursors = cursors
        self.counts = SampleCounts()
        """What became of the conversations of `rows`, of the whole stream up to where it is."""

    def rows(self, start: int = 0, shard: Shard = ONE_RING) -> Iterator[PackedRow]:
        """Yield the rows of one ring, from sequence `start` on.

        All rows are packed, and those of other rings dropped, so that rings agree on what a
        sequence is; those between a cursor and `start` are packed again.
        """
        # Before the first row of a ring there is nothing to resume, wherever in the run it lies.
        resumed = start if shard.num_below(start) else 0
        cursor = self._cursors and self._cursors.newest(resumed, self._fingerprint())
        packer: Packer[Sample] = _packer(self._table)
        sequence, first_epoch, place = 0, 0, Place()
        if cursor:
            sequence, first_epoch = cursor.sequence, cursor.data_epoch
            place = Place(cursor.positions, cursor.num_parts)
            _log.info("packing goes on from the cursor at row %d", sequence)
            self._restore(packer, cursor)
        elif self._cursors:
            self._cursors.save(self._cursor(0, 0, place, packer))
        for data_epoch in range(first_epoch, self._table.data_epochs):
            samples = self._source.samples(data_epoch, place, self.counts)
            for row in pack(packer, samples):
                if sequence >= start and shard.holds(sequence):
                    yield make_row(row, self._table.row_tokens, sequence, data_epoch)
                sequence += 1
                if self._cursors and sequence % self._table.cursor_rows == 0:
                    self._cursors.save(self._cursor(sequence, data_epoch, samples.place, packer))
            place = Place()

    def count_rows(self) -> int | None:
        """Return how many rows there will be, or None where counting would keep the run waiting."""
        if self._source.num_bytes > self._table.count_ahead_bytes:
            return None
        lengths: dict[int, list[range]] = {}
        count = 0
        for data_epoch in range(self._table.data_epochs):
            # A range stands for a sample of its length.
            packer: Packer[range] = _packer(self._table)
            count += sum(1 for _ in pack(packer, self._lengths(data_epoch, lengths)))
        return count

    def _lengths(self, data_epoch: int, known: dict[int, list[range]]) -> Iterator[range]:
        for row in self._source.rows(data_epoch):
            if row.sample_id not in known:
                samples = self._source.maybe_samples(row, SampleCounts())
                known[row.sample_id] = [range(len(sample)) for sample in samples]
            yield from known[row.sample_id]

    def _fingerprint(self) -> str:
        table = self._table
        packing = (table.row_tokens, table.max_documents, table.packing_window)
        return "-".join(map(str, (self._source.fingerprint, *packing)))

    def _restore(self, packer: Packer[Sample], cursor: Cursor) -> None:
        samples = iter(self._source.read_all([key for row in cursor.open_rows for key in row]))
        packer.restore([[next(samples) for _ in row] for row in cursor.open_rows])
        self.counts.skipped = cursor.skipped.model_copy(deep=True)
        self.counts.noted = cursor.noted.model_copy(deep=True)
        self.counts.num_cut_answers = cursor.num_cut_answers

    def _cursor(
        self, sequence: int, data_epoch: int, place: Place, packer: Packer[Sample]
    ) -> Cursor:
        return Cursor(
            fingerprint=self._fingerprint(),
            sequence=sequence,
            data_epoch=data_epoch,
            positions=place.positions,
            num_parts=place.num_parts,
            open_rows=tuple(
                tuple((sample.sample_id, sample.part) for sample in row.samples)
                for row in packer.open_rows
            ),
            skipped=self.counts.skipped.model_copy(deep=True),
            noted=self.counts.noted.model_copy(deep=True),
            num_cut_answers=self.counts.num_cut_answers,
        )


def _packer(table: DataTable) -> Packer[Any]:
    return Packer(table.row_tokens, table.max_documents, table.packing_window)
