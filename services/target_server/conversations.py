"""Conversations as tokenized samples, in an order drawn from the seed.

A row that cannot be used is skipped, counted under its reason, and the first ids of each reason
are kept: one bad row never ends a run, unless `on_bad_row = "fail"` asks for that. The order is a
function of (seed, data_epoch) alone, and a pass can begin at any place that an earlier one was at.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.contracts.data_manifest import DataManifest, DataSource
from common.errors import ConfigError, RowRejectedError
from common.target.chat import MaskOptions, render_samples, template_fingerprint
from services.target_server.counts import SampleCounts
from services.target_server.coverage import MaskCoverage
from services.target_server.data_config import DataTable
from services.target_server.inputs.formats import (
    Conversation,
    Pretokenised,
    name_of,
    parse,
    read_conversation,
)
from services.target_server.inputs.mixture import Mixture, Pass, RowRef, source_of
from services.target_server.packing import Sample

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where in a data epoch a pass is."""

    positions: tuple[int, ...] = ()
    """Rows that each source has given; empty at the start."""
    num_parts: int = 0
    """Samples that were taken of the row that comes next."""


class Conversations:
    """The samples of all sources; one row is held at a time."""

    def __init__(
        self,
        table: DataTable,
        tokenizer: Tokenizer,
        template_kwargs: dict[str, Any],
        seed: int,
        index_folder: Path | None = None,
    ) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._seed = seed
        self._mask_options = mask_options(table)
        self._vocabulary_size = len(tokenizer)
        self._most_characters = table.row_tokens * max(map(len, tokenizer.get_vocab()))
        self._mixture = Mixture(table, seed, index_folder)
        self.counts = SampleCounts()
        """Counts of the pass that began last."""
        self._tags = [source.tag for source in manifest_of(table).sources]
        self._formats = [source.format for source in table.all_sources]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the samples and their order: files by size and beginning, seed, rendering."""
        table = self._table
        parts = [
            *(reader.fingerprint() for reader in self._mixture.readers),
            *((source.weight, source.format) for source in table.all_sources),
            (table.shuffle, table.shuffle_buffer, table.max_conversations, table.keep_cut_answers),
            (self._seed, table.allow_full_mask),
            template_fingerprint(
                self._tokenizer,
                self._template_kwargs,
                options=self._mask_options,
                max_tokens=table.row_tokens,
            ),
        ]
        return xxhash.xxh3_64_hexdigest(repr(parts).encode())

    @property
    def num_bytes(self) -> int:
        """Size of all rows; of what is compressed, a guess."""
        return self._mixture.num_bytes

    def samples(
        self, data_epoch: int, place: Place = Place(), counts: SampleCounts | None = None
    ) -> "SamplePass":
        """Return one pass over the usable samples, from `place` on; add to `counts`."""
        self.counts = SampleCounts() if counts is None else counts
        return SamplePass(self, data_epoch, place, self.counts, self._table.allow_full_mask)

    def rows(self, data_epoch: int, positions: Sequence[int] = ()) -> Pass:
        """Return one pass over the rows, usable or not."""
        return self._mixture.rows(data_epoch, positions)

    def read(self, sample_id: int) -> list[Sample]:
        """Return the samples of one row, or raise `RowRejectedError`."""
        return self.samples_of(sample_id, parse(self._mixture.read_all([sample_id])[sample_id]))

    def read_all(self, keys: Sequence[tuple[int, int]]) -> list[Sample]:
        """Return samples by (sample id, part), in the order of the keys."""
        raw = self._mixture.read_all([sample_id for sample_id, _ in keys])
        return [self.samples_of(i, parse(raw[i]))[part] for i, part in keys]

    def maybe_samples(self, row: RowRef, counts: SampleCounts) -> list[Sample]:
        """Return the samples of a row, none where it is skipped."""
        raw = self._mixture.read(row) if row.raw is None else row.raw
        path = self._mixture.readers[row.source].path
        name = f"{path.name} line {row.number + 1}"
        try:
            content = parse(raw)
            name = name_of(content, name)
            samples = self.samples_of(row.sample_id, content)
        except RowRejectedError as error:
            place = f"{path} line {row.number + 1}, conversation {name!r}"
            if self._table.on_bad_row == "fail":
                raise ConfigError(
                    f'data: {place}: {error}; correct it or set data.on_bad_row="skip"'
                ) from error
            if row.is_first_time:
                if error.reason not in counts.skipped.counts:
                    _log.warning("%s is skipped: %s", place, error)
                counts.skipped.add(error.reason, name)
            return []
        if row.is_first_time:
            counts.num_cut_answers += content.get("finish_reason") == "length"
            for note in {note for sample in samples for note in sample.notes}:
                counts.noted.add(note, name)
        return samples

    def samples_of(self, sample_id: int, row: dict[str, Any]) -> list[Sample]:
        """Return what one row gives to train on, or raise `RowRejectedError`."""
        source = source_of(sample_id)
        conversation = read_conversation(row, self._formats[source])
        if conversation.was_cut and not self._table.keep_cut_answers:
            raise RowRejectedError("cut_answer", "its finish_reason is 'length'")
        parts = self._tokenized(conversation)
        for ids, _ in parts:
            self._check(ids)
        return [
            Sample(sample_id, self._tags[source], ids.token_ids, ids.loss_mask, part, notes)
            for part, (ids, notes) in enumerate(parts)
        ]

    def _tokenized(self, conversation: Conversation) -> list[tuple[Pretokenised, tuple[str, ...]]]:
        """Return ids and notes of each sample."""
        if isinstance(conversation.content, Pretokenised):
            self._check_ids(conversation.content.token_ids)
            return [(conversation.content, ())]
        self._check_characters(conversation.content)
        try:
            rendered = render_samples(
                self._tokenizer,
                conversation.content,
                self._template_kwargs,
                tools=conversation.tools,
                options=self._mask_options,
                last_turn_was_cut=conversation.was_cut,
            )
        except TypeError as error:
            # What a tokenizer says of half a surrogate pair, which JSON can have as an escape.
            if "TextInputSequence" not in str(error):
                raise
            raise RowRejectedError("bad_utf8", "the text has half a surrogate pair") from error
        return [
            (
                Pretokenised(
                    np.array(sample.token_ids, dtype=np.int32),
                    np.frombuffer(bytes(sample.loss_mask), dtype=np.uint8),
                ),
                sample.notes,
            )
            for sample in rendered
        ]

    def _check(self, ids: Pretokenised) -> None:
        row_tokens = self._table.row_tokens
        mask = ids.loss_mask[:row_tokens]
        if b"\1\1" not in mask.tobytes():
            # An anchor is a supervised token with a supervised successor.
            raise RowRejectedError(
                "no_loss_tokens",
                f"no two supervised tokens in succession in the first {row_tokens}",
            )
        if len(ids.token_ids) > row_tokens:
            raise RowRejectedError(
                "too_long", f"got {len(ids.token_ids)} tokens, expected at most {row_tokens}"
            )

    def _check_characters(self, messages: list[Any]) -> None:
        """Refuse what no row can hold before it is tokenized, which takes 160 bytes a character."""
        size = num_characters(messages)
        if size > self._most_characters:
            raise RowRejectedError(
                "too_long",
                f"got {size} characters, expected at most {self._most_characters}: the longest token "
                f"times {self._table.row_tokens}",
            )

    def _check_ids(self, token_ids: np.ndarray) -> None:
        if token_ids.max() >= self._vocabulary_size:
            raise RowRejectedError(
                "id_outside_vocabulary",
                f"got id {token_ids.max()}, expected less than {self._vocabulary_size}",
            )
        bos = self._tokenizer.bos_token_id
        if bos is not None and token_ids[:2].tolist() == [bos, bos]:
            raise RowRejectedError("double_bos", f"it begins with token {bos} twice")


class SamplePass(Iterator[Sample]):
    """The samples of one data epoch, in order, and the place behind the last one."""

    def __init__(
        self,
        conversations: Conversations,
        data_epoch: int,
        place: Place,
        counts: SampleCounts,
        allow_full_mask: bool,
    ) -> None:
        self._conversations = conversations
        self._data_epoch = data_epoch
        self._rows = conversations.rows(data_epoch, place.positions)
        self._counts = counts
        self._allow_full_mask = allow_full_mask
        self._parts: list[Sample] = []
        self._before: tuple[int, ...] = ()
        self._num_parts = 0
        self._is_fresh = not any(place.positions)
        self.place = place
        counts.coverage = MaskCoverage()
        for _ in range(place.num_parts):
            next(self)

    def __next__(self) -> Sample:
        """Return the next sample; raise `ConfigError` where a whole epoch has none."""
        while not self._parts:
            self._before, self._num_parts = self._rows.positions, 0
            row = next(self._rows, None)
            if row is None:
                self._end()
                raise StopIteration
            self._parts = self._conversations.maybe_samples(row, self._counts)
        sample = self._parts.pop(0)
        self._num_parts += 1
        self.place = (
            Place(self._before, self._num_parts) if self._parts else Place(self._rows.positions)
        )
        self._counts.coverage.add(sample.loss_mask)
        self._counts.coverage.check(allow_full_mask=self._allow_full_mask, is_over=False)
        return sample

    def _end(self) -> None:
        counts = self._counts
        self.place = Place(self._rows.positions)
        if self._is_fresh and not counts.coverage.num_samples:
            raise ConfigError(
                f"data: none of the {sum(self._rows.positions)} conversations can be used "
                f"({counts.skipped}); check the files and the target's chat template"
            )
        counts.coverage.check(allow_full_mask=self._allow_full_mask, is_over=True)
        _log.info("data epoch %d: %s", self._data_epoch, counts.coverage)
        if self._data_epoch:
            return
        _log.info(
            "of the conversations that are used, %d have a cut answer", counts.num_cut_answers
        )
        if counts.skipped.total:
            _log.warning("skipped %d conversations: %s", counts.skipped.total, counts.skipped)
        if counts.noted.total:
            _log.warning("used, but odd: %s", counts.noted)


def num_characters(messages: list[Any]) -> int:
    """Return the length of the messages' texts: of strings, and of the text parts of lists."""
    values = [value for m in messages if isinstance(m, dict) for value in m.values()]
    parts = [part for value in values if isinstance(value, list) for part in value]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return sum(len(text) for text in (*values, *texts) if isinstance(text, str))


def mask_options(table: DataTable) -> MaskOptions:
    """Return which turns are supervised."""
    return MaskOptions(table.train_only_last_turn, table.one_row_a_turn)


def manifest_of(table: DataTable) -> DataManifest:
    """Number the tags in the order of the sources."""
    sources = table.all_sources
    tags = tuple(dict.fromkeys(source.tag_name for source in sources))
    return DataManifest(
        tags=tags,
        sources=tuple(
            DataSource(path=str(s.path), weight=s.weight, tag=tags.index(s.tag_name))
            for s in sources
        ),
    )
