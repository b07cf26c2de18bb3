"""The order of one data epoch over all sources: which row comes next, and from which place on.

Each source has a lane. Rows that can be read by number come by a permutation of their numbers; a
compressed file's come in its order through a buffer from which the next is drawn. The next lane is
drawn in proportion to what each has left, so that the whole is evenly mixed to its end. All is a
function of (seed, data_epoch, positions); positions are one integer a source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError
from services.target_server.data_config import DataTable
from services.target_server.inputs.order import Permutation, hash_of
from services.target_server.inputs.readers import CompressedLines, RawRow, Reader, open_reader

_NUMBER_BITS = 40
_UNIT = 1 << 32


@dataclass(frozen=True)
class RowRef:
    """One row in the order of a pass."""

    source: int
    number: int
    """Of the row in its source, from 0."""
    is_first_time: bool
    """Whether no earlier place of the run's order has this row."""
    raw: RawRow | None = None
    """What a stream has read already."""

    @property
    def sample_id(self) -> int:
        """Source and number in one integer."""
        return self.source << _NUMBER_BITS | self.number


def source_of(sample_id: int) -> int:
    """Return the number of a sample's source."""
    return sample_id >> _NUMBER_BITS


class Lane(Protocol):
    """What one source still has in a data epoch."""

    position: int

    @property
    def remaining(self) -> int: ...
    def take(self) -> RowRef: ...


class Mixture:
    """The rows of all sources."""

    def __init__(self, table: DataTable, seed: int, index_folder: Path | None) -> None:
        self._table = table
        self._seed = seed
        self.readers: list[Reader] = [
            open_reader(source.path, index_folder, table.max_conversations)
            for source in table.all_sources
        ]
        for reader in self.readers:
            if reader.num_bytes == 0 or (
                not isinstance(reader, CompressedLines) and not len(reader)
            ):
                raise ConfigError(
                    f"data.path={str(reader.path)!r} is empty; expected one conversation a line"
                )

    @property
    def num_bytes(self) -> int:
        """Size of all rows; of what is compressed, a guess."""
        return sum(reader.num_bytes for reader in self.readers)

    def rows(self, data_epoch: int, positions: Sequence[int] = ()) -> "Pass":
        """Return one pass, from its start or from the positions that an earlier one was at."""
        positions = positions or [0] * len(self.readers)
        lanes = [self._lane(i, data_epoch, position) for i, position in enumerate(positions)]
        return Pass(lanes, (self._seed, data_epoch), is_shuffled=self._table.shuffle)

    def read(self, row: RowRef) -> RawRow:
        """Return what a row holds that no stream has read already."""
        found: RawRow = self.readers[row.source].read_all([row.number])[row.number]
        return found

    def read_all(self, sample_ids: Sequence[int]) -> dict[int, RawRow]:
        """Return rows by their sample ids."""
        found = {}
        for source, reader in enumerate(self.readers):
            numbers = [i & (1 << _NUMBER_BITS) - 1 for i in sample_ids if source_of(i) == source]
            for number, raw in reader.read_all(numbers).items():
                found[source << _NUMBER_BITS | number] = raw
        return found

    def _lane(self, source: int, data_epoch: int, position: int) -> Lane:
        table, reader = self._table, self.readers[source]
        weight = table.all_sources[source].weight
        if isinstance(reader, CompressedLines):
            buffer = table.shuffle_buffer if table.shuffle else 1
            stream_key = (self._seed, source, data_epoch)
            return StreamLane(
                reader, source, position, weight=weight, buffer=buffer, key=stream_key
            )
        key = (self._seed, source) if table.shuffle else ()
        return IndexedLane(len(reader), source, position, weight=weight, epoch=data_epoch, key=key)


class Pass(Iterator[RowRef]):
    """The rows of one data epoch in order."""

    def __init__(self, lanes: list[Lane], key: tuple[int, ...], *, is_shuffled: bool) -> None:
        self._lanes = lanes
        self._key = key
        self._is_shuffled = is_shuffled

    @property
    def positions(self) -> tuple[int, ...]:
        """How many rows each source has given."""
        return tuple(lane.position for lane in self._lanes)

    def __next__(self) -> RowRef:
        """Return the next row."""
        left = [lane.remaining for lane in self._lanes]
        total = sum(left)
        if not total:
            raise StopIteration
        draw = 0
        if self._is_shuffled and len(left) > 1:
            draw = hash_of(*self._key, sum(self.positions)) % total
        for lane, count in zip(self._lanes, left, strict=True):
            if draw < count:
                return lane.take()
            draw -= count
        raise AssertionError("a draw below the total lies in a lane")


class IndexedLane:
    """A source whose rows are read by number.

    Data epochs follow one another in one endless row of permutations, of which each takes
    `weight` times the source's rows: with weight 0.5 two epochs have each row once.
    """

    def __init__(
        self,
        count: int,
        source: int,
        position: int,
        *,
        weight: float,
        epoch: int,
        key: tuple[int, ...],
    ) -> None:
        self._count, self._source, self._key = count, source, key
        self._start = int(epoch * count * weight)
        self._length = int((epoch + 1) * count * weight) - self._start
        self._permutation: tuple[int, Permutation] | None = None
        self.position = position

    @property
    def remaining(self) -> int:
        """Rows to come."""
        return self._length - self.position

    def take(self) -> RowRef:
        """Return the next row."""
        turn, number = divmod(self._start + self.position, self._count)
        if self._key:
            if self._permutation is None or self._permutation[0] != turn:
                self._permutation = turn, Permutation(self._count, *self._key, turn)
            number = self._permutation[1][number]
        self.position += 1
        return RowRef(self._source, number, is_first_time=turn == 0)


class StreamLane:
    """A compressed file. A weight above 1 reads it again, a fraction keeps rows by a hash."""

    def __init__(
        self,
        reader: CompressedLines,
        source: int,
        position: int,
        *,
        weight: float,
        buffer: int,
        key: tuple[int, int, int],
    ) -> None:
        self._expected = max(1, int(reader.expected_rows * weight))
        self._rows = _weighted(reader, source, weight, buffer, key)
        for _ in range(position):
            next(self._rows, None)
        self._next = next(self._rows, None)
        self.position = position

    @property
    def remaining(self) -> int:
        """Rows to come by the expected number; at least 1 until the last is taken."""
        return max(1, self._expected - self.position) if self._next is not None else 0

    def take(self) -> RowRef:
        """Return the next row."""
        row, self._next = self._next, next(self._rows, None)
        assert row is not None
        self.position += 1
        return row


def _weighted(
    reader: CompressedLines, source: int, weight: float, buffer: int, key: tuple[int, int, int]
) -> Iterator[RowRef]:
    turn = 0
    while weight > turn:
        share = int(min(1.0, weight - turn) * _UNIT)
        is_first_time = turn == 0 and key[-1] == 0
        kept = (
            RowRef(source, number, is_first_time, raw)
            for number, raw in reader.stream()
            if share == _UNIT or hash_of(*key, turn, number) % _UNIT < share
        )
        yield from _through_buffer(kept, buffer, (*key, turn))
        turn += 1


def _through_buffer(rows: Iterator[RowRef], size: int, key: tuple[int, ...]) -> Iterator[RowRef]:
    """Draw each next row from `size` that wait, and put the one that follows in its place."""
    waiting: list[RowRef] = []
    count = 0
    for row in rows:
        if len(waiting) < size:
            waiting.append(row)
            continue
        place = hash_of(*key, count) % size
        count += 1
        chosen, waiting[place] = waiting[place], row
        yield chosen
    while waiting:
        place = hash_of(*key, count) % len(waiting)
        count += 1
        waiting[place], waiting[-1] = waiting[-1], waiting[place]
        yield waiting.pop()
