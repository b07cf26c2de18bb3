"""Figures of one checkpoint over all prompts, and the file that keeps them.

acceptance_length      tokens emitted per target pass, bonus included, pooled over all passes;
                       the first token of an answer comes of the prefill and does not count
acceptance_rate_at[k]  passes that emitted draft k + 1 as accepted, over all passes: every pass
                       drafts every slot, so 1 + sum of the rates is the acceptance length
speedup                seconds per token of plain decoding over those of speculative decoding,
                       prefills of the target and warm-up excluded
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.contracts.control_messages import EvaluationResult
from common.lifecycle import write_atomically
from services.evaluator.decode import PlainText, SpeculativeText
from services.evaluator.replay import Replay
from services.evaluator.ties import Difference


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, decoded in both ways and replayed."""

    id: str
    num_prompt_tokens: int
    plain: PlainText
    speculative: SpeculativeText
    replay: Replay
    difference: Difference | None

    @property
    def emitted(self) -> list[int]:
        """Tokens of each target pass."""
        return [block.num_emitted for block in self.speculative.blocks]

    @property
    def is_mismatch(self) -> bool:
        """Whether the two answers differ by more than a float tie."""
        return self.difference is not None and not self.difference.is_tie


def summarise(checkpoint: Path, step: int, records: Sequence[PromptRecord]) -> EvaluationResult:
    """Pool the records of one checkpoint."""
    blocks = [block for record in records for block in record.speculative.blocks]
    num_draft_tokens = max((len(block.draft_token_ids) for block in blocks), default=0)
    emitted = [block.num_emitted for block in blocks]
    replayed = [count for record in records for count in record.replay.emitted]
    return EvaluationResult(
        checkpoint=str(checkpoint),
        step=step,
        num_prompts=len(records),
        acceptance_length=mean(emitted),
        replay_acceptance_length=mean(replayed),
        acceptance_rate_at=tuple(
            mean([float(count > slot) for count in emitted])
            for slot in range(1, num_draft_tokens + 1)
        ),
        speedup=_speedup(records),
        num_float_ties=sum(r.difference is not None and r.difference.is_tie for r in records),
        num_mismatches=sum(record.is_mismatch for record in records),
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def write_report(
    path: Path, result: EvaluationResult, records: Sequence[PromptRecord], **about: Any
) -> None:
    """Write result, records and what was evaluated as one JSON file, whole or not at all."""
    content = {
        **result.model_dump(mode="json"),
        **about,
        "mean_prompt_acceptance_length": mean([mean(r.emitted) for r in records if r.emitted]),
        "num_replay_ties": sum(record.replay.num_ties for record in records),
        "num_replay_differences": sum(record.replay.num_differences for record in records),
        "plain_seconds_per_token": _plain_rate(records),
        "speculative_seconds_per_token": _speculative_rate(records),
        "prompts": [_describe(record) for record in records],
    }
    write_atomically(path, _to_json(content))


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
    return {
        "id": record.id,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_tokens": len(record.speculative.token_ids),
        "acceptance_length": mean(record.emitted),
        "replay_acceptance_length": mean(record.replay.emitted),
        "emitted": record.emitted,
        "num_replay_ties": record.replay.num_ties,
        "num_replay_differences": record.replay.num_differences,
        "plain_seconds": record.plain.seconds,
        "speculative_seconds": record.speculative.seconds,
        "difference": None if record.difference is None else asdict(record.difference),
    }


def _speedup(records: Sequence[PromptRecord]) -> float:
    speculative = _speculative_rate(records)
    return _plain_rate(records) / speculative if speculative else 0.0


def _plain_rate(records: Sequence[PromptRecord]) -> float:
    return _seconds_per_token([record.plain for record in records])


def _speculative_rate(records: Sequence[PromptRecord]) -> float:
    return _seconds_per_token([record.speculative for record in records])


def _seconds_per_token(texts: Sequence[PlainText | SpeculativeText]) -> float:
    """Pool; the first token of each text is the prefill's."""
    num_tokens = sum(len(text.token_ids) - 1 for text in texts)
    return sum(text.seconds for text in texts) / num_tokens if num_tokens else 0.0
