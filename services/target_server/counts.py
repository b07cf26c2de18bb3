"""What became of the conversations of a stream: used, skipped, odd, and how much is supervised."""

from dataclasses import dataclass, field

from pydantic import BaseModel

from services.target_server.coverage import MaskCoverage

_NUM_IDS_KEPT = 3


class SkipCounts(BaseModel):
    """How many conversations fall under which reason, and the first ids of each."""

    counts: dict[str, int] = {}
    first_ids: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        """Count one."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        ids = self.first_ids.setdefault(reason, [])
        if len(ids) < _NUM_IDS_KEPT:
            ids.append(name)

    @property
    def total(self) -> int:
        """Conversations, all reasons together."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{reason}: {count} (first: {', '.join(self.first_ids[reason])})"
            for reason, count in sorted(self.counts.items())
        )


@dataclass
class SampleCounts:
    """Counts of a stream; each conversation is counted the first time it comes."""

    skipped: SkipCounts = field(default_factory=SkipCounts)
    noted: SkipCounts = field(default_factory=SkipCounts)
    """Conversations that are used and odd."""
    num_cut_answers: int = 0
    """Conversations that are used and whose last answer was cut."""
    coverage: MaskCoverage = field(default_factory=MaskCoverage)
    """Supervised tokens of one data epoch."""
