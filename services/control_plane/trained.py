"""How much each group has trained, which never goes down while a control plane lives.

A killed worker's successor reports nothing while it loads, then what its checkpoint had: the rows behind
that are trained again, and count when they are more than before. Owners' accounts count each row once, so
a control plane that was started meanwhile knows from them what no worker has said yet.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from common.contracts.control_messages import Report, RingReport, TargetReport, WorkerReport


@dataclass(frozen=True)
class Trained:
    """What one group has trained."""

    rows: int = 0
    tokens: int = 0


class TrainedMarks:
    """The most that each group was seen to have trained."""

    def __init__(self) -> None:
        self._marks: dict[str, Trained] = {}

    def note(self, reports: Iterable[tuple[str, Report | None]]) -> dict[str, Trained]:
        """Take the last reports by the names of their instances; return what groups have trained."""
        for group, seen in count_trained(reports).items():
            mark = self._marks.get(group, Trained())
            self._marks[group] = Trained(max(mark.rows, seen.rows), max(mark.tokens, seen.tokens))
        return dict(self._marks)


def count_trained(reports: Iterable[tuple[str, Report | None]]) -> dict[str, Trained]:
    """Return what these reports say of each group; of two under one name the later is the other's
    successor, and both have the rows of their checkpoint."""
    workers: dict[str, WorkerReport] = {}
    rings: dict[str, RingReport] = {}
    for name, report in reports:
        if isinstance(report, WorkerReport):
            workers[name] = max(workers.get(name, report), report, key=lambda r: r.trained_rows)
        elif isinstance(report, TargetReport) and report.ring is not None:
            rings[name] = report.ring
    rows, tokens, accounts = Counter[str](), Counter[str](), Counter[str]()
    for worker in workers.values():
        rows[worker.group] += worker.trained_rows
        tokens[worker.group] += worker.trained_tokens
    for ring in rings.values():
        for account in ring.groups:
            accounts[account.group] += account.consumed + account.settled_before
    return {
        group: Trained(max(rows[group], accounts[group]), tokens[group])
        for group in {*rows, *accounts}
    }
