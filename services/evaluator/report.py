"""Figures of one checkpoint over all prompts, and the file that keeps them.

acceptance_length      tokens emitted per target pass, bonus included, pooled over all passes;
                       the first token of an answer comes of the prefill and does not count
acceptance_rate_at[k]  passes that emitted draft k + 1 as accepted, over all passes: every pass
                       drafts every slot, so 1 + sum of the rates is the acceptance length
speedup                seconds per token of plain decoding over those of speculative decoding, both
                       in batches; prefills of the target and warm-up excluded
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.contracts.control_messages import EvaluationFigures, EvaluationResult
from common.lifecycle import write_atomically
from services.evaluator.decode import Pass, Text
from services.evaluator.replay import Replay
from services.evaluator.ties import Difference

_ANYWHERE = range(sys.maxsize)


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, decoded in both ways and, where greedy, replayed."""

    id: str
    tag: str
    num_prompt_tokens: int
    plain: Text
    speculative: Text
    replay: Replay | None
    difference: Difference | None

    @property
    def emitted(self) -> list[int]:
        """Tokens of each target pass."""
        return [each.num_emitted for each in self.speculative.passes]

    @property
    def replayed(self) -> list[int]:
        """Tokens of each target pass by replay walk."""
        return self.replay.emitted if self.replay else []

    @property
    def is_mismatch(self) -> bool:
        """Whether the two answers differ by more than a float tie."""
        return self.difference is not None and not self.difference.is_tie


@dataclass
class _Tally:
    """Sums over passes."""

    emitted: list[int]
    replayed: list[int]
    plain: list[Pass]
    speculative: list[Pass]

    def figures(self) -> EvaluationFigures:
        return EvaluationFigures(
            num_passes=len(self.emitted),
            acceptance_length=mean(self.emitted),
            replay_acceptance_length=mean(self.replayed) if self.replayed else None,
            speedup=_ratio(seconds_per_token(self.plain), seconds_per_token(self.speculative)),
        )


def summarise(
    checkpoint: Path,
    step: int,
    records: Sequence[PromptRecord],
    context_buckets: Sequence[int] = (),
    **about: Any,
) -> EvaluationResult:
    """Pool the records of one checkpoint; `about` are more fields of the result."""
    emitted = [count for record in records for count in record.emitted]
    drafts = [len(each.draft_token_ids) for r in records for each in r.speculative.passes]
    whole = _tally(records).figures()
    return EvaluationResult(
        checkpoint=str(checkpoint),
        step=step,
        num_prompts=len(records),
        acceptance_length=whole.acceptance_length,
        replay_acceptance_length=whole.replay_acceptance_length,
        acceptance_rate_at=tuple(
            mean([float(count > slot) for count in emitted])
            for slot in range(1, max(drafts, default=0) + 1)
        ),
        speedup=whole.speedup,
        num_float_ties=sum(r.difference is not None and r.difference.is_tie for r in records),
        num_mismatches=sum(record.is_mismatch for record in records),
        by_tag=_by_tag(records),
        by_context=_by_context(records, context_buckets),
        **about,
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def seconds_per_token(passes: Sequence[Pass]) -> float:
    """Pool the time of passes over what they emitted; 0 of nothing."""
    return _ratio(sum(p.seconds for p in passes), sum(p.num_emitted for p in passes))


def curves(result: EvaluationResult) -> dict[str, float | str]:
    """Return the result as figures for the run's metrics."""
    rates = {f"acceptance_rate_at/{k}": r for k, r in enumerate(result.acceptance_rate_at, 1)}
    slices = {
        f"acceptance_length/{kind}/{name}": figures.acceptance_length
        for kind, found in (("tag", result.by_tag), ("context", result.by_context))
        for name, figures in found.items()
    }
    figures = {
        "acceptance_length": result.acceptance_length,
        "replay_acceptance_length": result.replay_acceptance_length,
        "speedup": result.speedup,
        **rates,
        **slices,
    }
    return {
        "checkpoint": result.checkpoint,
        "arm": result.arm,
        "temperature": result.temperature,
        **{f"eval/{name}": value for name, value in figures.items() if value is not None},
    }


def describe(result: EvaluationResult) -> str:
    """Return the figures in one line."""
    replayed = result.replay_acceptance_length
    return (
        f"acceptance length {result.acceptance_length:.3f} live, "
        f"{'none' if replayed is None else f'{replayed:.3f}'} replayed, "
        f"speed-up {result.speedup:.2f}, {result.num_float_ties} float ties, "
        f"{result.num_mismatches} mismatches"
    )


def write_report(
    path: Path, result: EvaluationResult, records: Sequence[PromptRecord], **about: Any
) -> None:
    """Write result, records and what was evaluated as one JSON file, whole or not at all."""
    whole = _tally(records)
    replays = [record.replay for record in records if record.replay]
    content = {
        **result.model_dump(mode="json"),
        **about,
        "mean_prompt_acceptance_length": mean([mean(r.emitted) for r in records if r.emitted]),
        "num_replay_ties": sum(replay.num_ties for replay in replays),
        "num_replay_differences": sum(replay.num_differences for replay in replays),
        "plain_seconds_per_token": seconds_per_token(whole.plain),
        "speculative_seconds_per_token": seconds_per_token(whole.speculative),
        "prompts": [_describe(record) for record in records],
    }
    write_atomically(path, _to_json(content))


def _by_tag(records: Sequence[PromptRecord]) -> dict[str, EvaluationFigures]:
    tags = dict.fromkeys(record.tag for record in records)
    return {tag: _tally([r for r in records if r.tag == tag]).figures() for tag in tags}


def _by_context(
    records: Sequence[PromptRecord], edges: Sequence[int]
) -> dict[str, EvaluationFigures]:
    found = {}
    for low, high in zip((0, *edges), (*edges, sys.maxsize), strict=True):
        tally = _tally(records, range(low, high))
        if tally.emitted:
            name = f"{low}-" if high == sys.maxsize else f"{low}-{high - 1}"
            found[name] = tally.figures()
    return found


def _tally(records: Sequence[PromptRecord], positions: range = _ANYWHERE) -> _Tally:
    """Gather the passes whose anchor stands at one of the positions."""
    tally = _Tally([], [], [], [])
    for record in records:
        start = record.num_prompt_tokens
        tally.plain += [p for p in record.plain.passes if start + p.anchor in positions]
        kept = [p for p in record.speculative.passes if start + p.anchor in positions]
        tally.speculative += kept
        tally.emitted += [p.num_emitted for p in kept]
        position = start
        for count in record.replayed:
            tally.replayed += [count] if position in positions else []
            position += count
    return tally


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


def _to_json(content: dict[str, Any]) -> str:
    """Return JSON with a line a field and, in lists of records, a line a record."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _describe(record: PromptRecord) -> dict[str, Any]:
    replay = record.replay
    return {
        "id": record.id,
        "tag": record.tag,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_tokens": len(record.speculative.token_ids),
        "acceptance_length": mean(record.emitted),
        "replay_acceptance_length": mean(replay.emitted) if replay else None,
        "emitted": record.emitted,
        "num_replay_ties": replay.num_ties if replay else 0,
        "num_replay_differences": replay.num_differences if replay else 0,
        "plain_seconds": record.plain.seconds,
        "speculative_seconds": record.speculative.seconds,
        "difference": None if record.difference is None else asdict(record.difference),
    }
