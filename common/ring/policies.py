"""What becomes of rows that a group does not take: `wait`, `skip` after a time, or `detach`.

    attached --no worker for detach_after_seconds, while another group is served--> detached
    attached --its last worker trains no more, as its Bye says, while another group is served--> detached
    detached --a worker's Hello--> attached

A detached group takes no rows: those that wait for it are skipped, and every later one as it is
published. Skipped rows are settled, and counted as published to the group and skipped. The last
group that is served is never detached: with nobody to train on them, rows are not spent.
"""

import logging
from collections.abc import Container

from common.config.shared import GroupTable
from common.contracts.control_messages import AbsentGroup
from common.ring.book import SlotBook
from common.ring.ledger import GroupLedger

_log = logging.getLogger(__name__)


class GroupPolicies:
    """Applies each group's policy to a ring's deliveries."""

    def __init__(
        self, groups: dict[str, GroupTable], book: SlotBook, ledgers: dict[str, GroupLedger]
    ) -> None:
        self._groups = groups
        self._book = book
        self._ledgers = ledgers
        self._absent_since: dict[str, float] = {}
        self._detached: set[str] = set()
        self._finished: set[str] = set()

    def attend(self, name: str) -> None:
        """A worker of the group is there: rows are for it again."""
        self._absent_since.pop(name, None)
        self._finished.discard(name)
        if name in self._detached:
            self._detached.remove(name)
            _log.warning("group %r has a worker again and gets the rows from here on", name)

    def leave(self, name: str, is_finished: bool) -> None:
        """A worker of the group has left; `is_finished`: as its last, and for good."""
        if is_finished:
            self._finished.add(name)

    def takers(self, sequence: int) -> list[str]:
        """Return the groups that a row is to be published to; skip it for a detached one."""
        lacking = []
        for name, ledger in self._ledgers.items():
            if ledger.lacks(sequence):
                lacking.append(name)
        if not self._detached:
            return lacking
        for name in self._detached.intersection(lacking):
            self._pass_over(name, sequence)
        return [name for name in lacking if name not in self._detached]

    def apply(self, present: Container[str], drained: Container[str], now: float) -> None:
        """Note who is there, detach who has been away too long, skip what is late.

        Args:
            present: groups that have a session.
            drained: groups whose every row is settled: they are served, whoever has left.
        """
        for name in self._groups:
            if name in present:
                self.attend(name)
            else:
                self._absent_since.setdefault(name, now)
        served = {name for name in self._groups if name in present or name in drained}
        for name, group in self._groups.items():
            if self._is_to_be_detached(name, now) and served - {name}:
                self._detach(name, now)
            if name in self._detached:
                self._skip(name, published_before=now)
                for sequence in self._ledgers[name].awaited():
                    self._pass_over(name, sequence)
            elif group.policy == "skip":
                self._skip(name, published_before=now - group.group_timeout_seconds)

    def postpone(self, seconds: float) -> None:
        """The owner itself has not listened for so long."""
        for name in self._absent_since:
            self._absent_since[name] += seconds

    def absent(self, now: float) -> tuple[AbsentGroup, ...]:
        """Return the groups without a worker that rows wait for, or are skipped for."""
        reports = (
            AbsentGroup(
                group=name,
                absent_seconds=now - since,
                num_waiting=len(self._book.ready(name)),
                is_blocking=self._book.is_blocked() and bool(self._book.ready(name)),
                is_detached=name in self._detached,
            )
            for name, since in self._absent_since.items()
        )
        return tuple(report for report in reports if report.num_waiting or report.is_detached)

    def _is_to_be_detached(self, name: str, now: float) -> bool:
        limit = self._groups[name].detach_after_seconds
        since = self._absent_since.get(name)
        is_over = limit > 0 and since is not None and now - since >= limit
        return (is_over or name in self._finished) and name not in self._detached

    def _detach(self, name: str, now: float) -> None:
        self._detached.add(name)
        if name in self._finished:
            _log.info("group %r trains no more: rows are skipped for it until a worker comes", name)
            return
        _log.warning(
            "group %r has had no worker for %.1f s and is detached: rows are skipped for it until "
            "one comes", name, now - self._absent_since[name],
        )  # fmt: skip

    def _skip(self, name: str, published_before: float) -> None:
        for delivery in self._book.ready(name):
            if delivery.published_at <= published_before:
                self._book.skip(delivery)
                self._ledgers[name].drop(delivery.row.sequence)

    def _pass_over(self, name: str, sequence: int) -> None:
        """Settle a row that the group is not offered."""
        self._ledgers[name].publish(sequence)
        self._ledgers[name].drop(sequence)
        self._book.accounts[name].update(published=1, skipped=1)
