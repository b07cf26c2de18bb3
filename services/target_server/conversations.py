"""Streams conversations from a JSONL file as tokenized samples, in an order drawn from the seed.

Only the lines' offsets are held in memory. A line that cannot be used is skipped, counted under
its reason, and the first ids of each reason are kept: one bad line never ends a run, unless
`on_bad_row = "fail"` asks for that. The order is a function of (seed, data_epoch) alone.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import ConfigError, RowRejectedError
from common.target.chat import MaskOptions, render_samples
from services.target_server.coverage import MaskCoverage
from services.target_server.data_config import DataTable
from services.target_server.packing import Sample

_log = logging.getLogger(__name__)
_NUM_IDS_KEPT = 3
_LARGEST_TAG = 0xFFFF


@dataclass
class SkipCounts:
    """How many conversations were skipped for which reason, and the first ids of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first_ids: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, sample_id: str) -> None:
        """Count one."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        ids = self.first_ids.setdefault(reason, [])
        if len(ids) < _NUM_IDS_KEPT:
            ids.append(sample_id)

    @property
    def total(self) -> int:
        """Skipped conversations, all reasons together."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{reason}: {count} (first: {', '.join(self.first_ids[reason])})"
            for reason, count in sorted(self.counts.items())
        )


class Conversations:
    """The samples of one file. Reads by offset, so each iteration holds one line."""

    def __init__(
        self, table: DataTable, tokenizer: Tokenizer, template_kwargs: dict[str, Any], seed: int
    ) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._mask_options = mask_options(table)
        self._seed = seed
        self._offsets = _line_offsets(table.path)
        if table.max_conversations:
            self._offsets = self._offsets[: table.max_conversations]
        self.skipped = SkipCounts()
        self.noted = SkipCounts()
        self.coverage = MaskCoverage()
        self.num_cut_answers = 0
        self._counted: set[int] = set()
        self._is_first_pass = True

    def __len__(self) -> int:
        """Return the number of lines, usable or not."""
        return len(self._offsets)

    def samples(self, data_epoch: int) -> Iterator[Sample]:
        """Yield the usable samples of one pass; log once what was skipped."""
        num_used = 0
        self.coverage = coverage = MaskCoverage()
        allow_full_mask = self._table.allow_full_mask
        with self._table.path.open("rb") as file:
            for line_number in self.order(data_epoch):
                file.seek(self._offsets[line_number])
                samples = self._maybe_samples(line_number, file.readline())
                num_used += bool(samples)
                for sample in samples:
                    coverage.add(sample.loss_mask)
                    coverage.check(allow_full_mask=allow_full_mask, is_over=False)
                    yield sample
        if num_used == 0:
            raise ConfigError(
                f"data.path={str(self._table.path)!r}: none of its {len(self)} conversations can be "
                f"used ({self.skipped}); check the file and the target's chat template"
            )
        coverage.check(allow_full_mask=allow_full_mask, is_over=True)
        _log.info("data epoch %d: %s", data_epoch, coverage)
        if self._is_first_pass:
            self._log_pass(num_used)
        self._is_first_pass = False

    def order(self, data_epoch: int) -> list[int]:
        """Return the line numbers of one pass in its order."""
        if not self._table.shuffle:
            return list(range(len(self)))
        keys = _hash_of_each(len(self), self._seed, data_epoch)
        return np.argsort(keys, kind="stable").tolist()

    def read(self, sample_id: int) -> list[Sample]:
        """Return the samples of one line, or raise `RowRejectedError`."""
        with self._table.path.open("rb") as file:
            file.seek(self._offsets[sample_id])
            return self._samples(sample_id, _parsed(file.readline()))

    def _log_pass(self, num_used: int) -> None:
        _log.info("%s: %d conversations, of which %d have a cut answer",
                  self._table.path, num_used, self.num_cut_answers)  # fmt: skip
        if self.skipped.total:
            _log.warning("%s: skipped %d conversations: %s",
                         self._table.path, self.skipped.total, self.skipped)  # fmt: skip
        if self.noted.total:
            _log.warning("%s: used, but odd: %s", self._table.path, self.noted)

    def _maybe_samples(self, line_number: int, line: bytes) -> list[Sample]:
        name = f"line {line_number + 1}"
        is_counted = line_number in self._counted
        try:
            row = _parsed(line)
            name = str(row.get("id", name))
            samples = self._samples(line_number, row)
        except RowRejectedError as error:
            if self._table.on_bad_row == "fail":
                raise ConfigError(
                    f"data.path={str(self._table.path)!r}, conversation {name!r}: {error}; "
                    f'correct it or set data.on_bad_row="skip"'
                ) from error
            if not is_counted:
                self._counted.add(line_number)
                self.skipped.add(error.reason, name)
            return []
        was_cut = row.get("finish_reason") == "length"
        notes = {note for sample in samples for note in sample.notes}
        if (was_cut or notes) and not is_counted:
            self._counted.add(line_number)
            self.num_cut_answers += was_cut
            for note in notes:
                self.noted.add(note, name)
        return samples

    def _samples(self, line_number: int, row: dict[str, Any]) -> list[Sample]:
        was_cut = row.get("finish_reason") == "length"
        if was_cut and not self._table.keep_cut_answers:
            raise RowRejectedError("cut_answer", "its finish_reason is 'length'")
        rendered = render_samples(
            self._tokenizer,
            row.get("messages", []),
            self._template_kwargs,
            tools=row.get("tools"),
            options=self._mask_options,
            last_turn_was_cut=was_cut,
        )
        samples = [
            Sample(
                sample_id=line_number,
                tag=_tag(row),
                token_ids=np.asarray(part.token_ids, dtype=np.int32),
                loss_mask=np.asarray(part.loss_mask, dtype=np.uint8),
                notes=part.notes,
            )
            for part in rendered
        ]
        for sample in samples:
            _check_sample(sample, self._table.row_tokens)
        return samples


def mask_options(table: DataTable) -> MaskOptions:
    """Return which turns are supervised."""
    return MaskOptions(table.train_only_last_turn, table.one_row_a_turn)


def _check_sample(sample: Sample, row_tokens: int) -> None:
    mask = sample.loss_mask[:row_tokens]
    if not (mask[:-1] & mask[1:]).any():
        # An anchor is a supervised token with a supervised successor.
        raise RowRejectedError(
            "no_loss_tokens", f"no two supervised tokens in succession in the first {row_tokens}"
        )
    if len(sample) > row_tokens:
        raise RowRejectedError(
            "too_long", f"got {len(sample)} tokens, expected at most {row_tokens}"
        )


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RowRejectedError("not_json", str(error)) from error
    if not isinstance(row, dict):
        raise RowRejectedError("not_json", f"got {type(row).__name__}, expected an object")
    return row


def _tag(row: dict[str, Any]) -> int:
    tag = row.get("tag", 0)
    if not isinstance(tag, int) or not 0 <= tag <= _LARGEST_TAG:
        raise RowRejectedError("bad_tag", f"got {tag!r}, expected an integer to {_LARGEST_TAG}")
    return tag


def _line_offsets(path: Path) -> np.ndarray:
    """Return where each line that is not blank begins; hold no text."""
    offsets = []
    position = 0
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                offsets.append(position)
            position += len(line)
    if not offsets:
        raise ConfigError(f"data.path={str(path)!r} is empty; expected one conversation a line")
    return np.asarray(offsets, dtype=np.int64)


def _hash_of_each(count: int, seed: int, data_epoch: int) -> np.ndarray:
    """Return a pseudo-random 64-bit key for 0 to count - 1, the same on every machine.

    The finaliser of splitmix64; numpy's own shuffles may change between its versions, and a
    resumed run must find its rows again.
    """
    start = (seed * 0x9E3779B97F4A7C15 + data_epoch * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    keys = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
