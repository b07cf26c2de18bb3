"""Measures acceptance on held-out rows: what decoding would accept, by the replay walk.

    every position of an answer as an anchor -> right prefix -> walk -> passes of the target an answer

Between steps, on the worker's own device; nothing is read back before every row is through.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.contracts.control_messages import HeldOutFigures
from common.contracts.rows import RowSchema
from common.drafters.dflash.metrics import replay_passes
from common.drafters.dflash.objective import DFlashObjective, StagedRow
from common.held_out import FILE_NAME, HeldOutRows, read_held_out

CONTEXT_BUCKETS = (256, 1024, 4096, 16384)
"""Tokens before the answer; a bucket ends below each."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Row:
    """A row on the device, with what is measured on it."""

    staged: StagedRow
    anchors: tuple[Tensor, ...]  # [A] int64 each
    is_valid: tuple[Tensor, ...]  # [A] bool each
    last: Tensor  # [T] int64, last token of the answer that a token is in
    starts: Tensor  # [n] int64, first token of each answer
    num_emitted: Tensor  # [n] int64, tokens behind it
    groups: Tensor  # [n] int64, where the figures of each answer belong
    group_at: Tensor  # [T] int64, of the answer that a token is in


class HeldOut:
    """The held-out rows of a run in a worker's memory."""

    def __init__(self, objective: DFlashObjective, rows: HeldOutRows, dtype: torch.dtype) -> None:
        self._objective = objective
        self._tags = rows.tags
        device = objective.head.device
        self._rows = [
            _prepare(rows, index, objective.num_anchors, device, dtype)
            for index in range(len(rows))
        ]

    def measure(self) -> tuple[HeldOutFigures, ...]:
        """Return the figures of all answers, and of each tag and context length. Syncs once."""
        num_slots = self._objective.drafter.spec.num_draft_tokens
        num_groups = len(self._tags) * (len(CONTEXT_BUCKETS) + 1)
        device = self._objective.head.device
        sums = torch.zeros(num_groups, 3 + 2 * num_slots, dtype=torch.float64, device=device)
        for row in self._rows:
            add_row(sums, self._objective, row)
        return tuple(figures_of(sums.cpu(), self._tags))


def open_held_out(
    directory: Path, schema: RowSchema, objective: DFlashObjective, dtype: torch.dtype
) -> HeldOut | None:
    """Read the run's held-out rows; None while the first target server has not written them."""
    path = directory / FILE_NAME
    if not path.exists():
        _log.info("no held-out rows yet: %s is not there", path)
        return None
    return HeldOut(objective, read_held_out(path, schema), dtype)


def add_row(sums: Tensor, objective: DFlashObjective, row: _Row) -> None:
    """Add a row to sums [G, 3 + 2 (S-1)]: answers, tokens, passes, then right and all drafts a slot."""
    prefix = torch.zeros_like(row.last)
    for anchors, is_valid in zip(row.anchors, row.is_valid, strict=True):
        is_right, is_supervised = objective.right_drafts(row.staged, anchors, is_valid)
        lengths = is_right.to(torch.int64).cumprod(-1).sum(-1)
        # Anchors that are not valid add nothing, wherever they point.
        prefix.index_add_(0, anchors, lengths * is_valid)
        drafts = torch.cat([is_right, is_supervised], -1).to(sums.dtype) * is_valid[:, None]
        sums[:, 3:].index_add_(0, row.group_at[anchors], drafts)
    passes = replay_passes(prefix, row.last)[row.starts]
    figures = torch.stack([torch.ones_like(passes), row.num_emitted, passes], -1)
    sums[:, :3].index_add_(0, row.groups, figures.to(sums.dtype))


def figures_of(sums: Tensor, tags: tuple[str, ...]) -> Iterator[HeldOutFigures]:
    """Yield the figures of everything, then of each tag and context length that has answers."""
    num_buckets = len(CONTEXT_BUCKETS) + 1
    yield _figures("", "", sums.sum(0))
    for group, values in enumerate(sums):
        if values[0] > 0:
            tag, bucket = tags[group // num_buckets], group % num_buckets
            yield _figures(tag, _bucket_name(bucket), values)


def _figures(tag: str, context: str, values: Tensor) -> HeldOutFigures:
    answers, emitted, passes, *drafts = values.tolist()
    right, total = drafts[: len(drafts) // 2], drafts[len(drafts) // 2 :]
    return HeldOutFigures(
        tag=tag,
        context=context,
        num_answers=int(answers),
        acceptance_length=emitted / passes if passes else 0.0,
        acceptance_rate_at=tuple(r / n if n else 0.0 for r, n in zip(right, total, strict=True)),
    )


def _bucket_name(bucket: int) -> str:
    if bucket < len(CONTEXT_BUCKETS):
        return f"under {CONTEXT_BUCKETS[bucket]}"
    return f"{CONTEXT_BUCKETS[-1]} and more"


def _prepare(
    rows: HeldOutRows, index: int, num_anchors: int, device: torch.device, dtype: torch.dtype
) -> _Row:
    documents, mask = rows.document_ids[index].long(), rows.loss_mask[index] != 0
    positions = torch.arange(len(documents))
    last, group_at = positions.clone(), torch.zeros_like(positions)
    starts, groups = [], []
    for number in range(int(documents.max()) + 1):
        answer = positions[(documents == number) & mask]
        if len(answer) < 2:
            continue
        first = int(answer[0])
        bucket = sum(int(rows.position_ids[index][first]) >= end for end in CONTEXT_BUCKETS)
        group = int(rows.document_tags[index][number]) * (len(CONTEXT_BUCKETS) + 1) + bucket
        last[answer], group_at[answer] = answer[-1], group
        starts.append(first)
        groups.append(group)
    start = torch.tensor(starts, dtype=torch.int64)
    anchors, is_valid = _anchors(positions[positions < last], num_anchors)
    staged = StagedRow(
        rows.token_ids[index].to(device),
        rows.document_ids[index].to(device),
        rows.position_ids[index].to(device),
        rows.loss_mask[index].to(device),
        rows.aux_hidden_states[index].to(device, dtype),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    return _Row(
        staged,
        tuple(part.to(device) for part in anchors),
        tuple(part.to(device) for part in is_valid),
        last.to(device),
        start.to(device),
        (last[start] - start).to(device),
        torch.tensor(groups, dtype=torch.int64, device=device),
        group_at.to(device),
    )


def _anchors(eligible: Tensor, num_anchors: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return eligible positions in runs of `num_anchors`, the last one filled up, and which are valid."""
    anchors, is_valid = [], []
    for part in eligible.split(num_anchors):
        spare = num_anchors - len(part)
        anchors.append(torch.nn.functional.pad(part, (0, spare)))
        is_valid.append(torch.arange(num_anchors) < len(part))
    return anchors, is_valid
