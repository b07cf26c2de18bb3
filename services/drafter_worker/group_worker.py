"""The loop of a worker whose group has one drafter.

    rows --> micro-steps --> [allreduce: each step   ] --> meeting --> step, lineage, rows settled
                             [local_sgd: sync_steps  ]
    waits for: a row (sync_wait_seconds), a meeting (bounded)      unblocked by: rows, the others, a stop

A meeting, in the same order at each member:

    words      who is there, with which weights, bringing what
    heal       who is behind takes weights, moments and lineage of the source; what it brings is void
    exchange   gradients or weights are summed; who has the sum goes on, who has not is behind next time
    save       the lowest rank writes a checkpoint where one is due; the next words tell the others

A row is consumed with the exchange that contains it. It is committed when the words show that a
checkpoint holds it and that nobody is behind: until then the weights that hold it may be lost. Rows
of weights that were lost are left to others by a fresh session with the ring.
"""

import hashlib
import json
import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.errors import PeerLostError
from services.drafter_worker.checkpoint import read_trainer
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.feed import StagedRow
from services.drafter_worker.meetings import Meeting, Meetings
from services.drafter_worker.meter import Progress
from services.drafter_worker.sync import (
    AllReduce,
    Exchange,
    Lineage,
    LocalSgd,
    Word,
    Words,
    check_agreement,
    gather_rows,
    hash_of,
    heal,
)
from services.drafter_worker.worker import DrafterWorker, Parts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Membership:
    """What makes a worker a member of its group."""

    meetings: Meetings
    agreement: dict[str, Any]
    lineage: Lineage


class GroupWorker(DrafterWorker):
    """Trains a group's drafter together with the others."""

    def __init__(
        self, config: WorkerConfig, parts: Parts, stop: threading.Event, membership: Membership
    ) -> None:
        """Take what a `DrafterWorker` takes, and the membership."""
        super().__init__(config, parts, stop)
        self._meetings = membership.meetings
        self._agreement = membership.agreement
        self._lineage = membership.lineage
        self._table = self._config.groups[self._config.training.group]
        self._is_local = self._table.sync == "local_sgd"
        stepper, optimizer = self._parts.stepper, self._parts.trainee.optimizer
        self._exchange: Exchange = LocalSgd(optimizer) if self._is_local else AllReduce(stepper)
        self._is_fresh = True
        self._is_leader = False
        self._is_over = False
        self._num_open = 0
        """Micro-steps since the last step; they are not in the weights yet."""
        self._open_tokens = 0
        self._num_tokens = 0
        """Tokens of steps that no exchange contains yet."""
        self._alone: set[int] = set()
        """Rows of steps that no exchange contains yet."""
        self._uncommitted: list[tuple[int, set[int]]] = []
        """Rows of this worker in the lineage, by the step of their exchange."""
        self._sums: Tensor | None = None
        """The group's packed sums since the last line of metrics."""
        self._idle_since = time.monotonic()
        self._leaving_since: float | None = None
        # Half of it: who is asked to stop has other things to do before it is killed.
        self._leave_seconds = self._table.sync_patience_seconds / 2

    def run(self) -> None:
        """Train until the group's stream is drained, `max_steps`, or a stop request."""
        if self._parts.trainee.is_resumed:
            self._write_metrics(is_resumed=True)
        elif self._parts.meter.index == 0:
            self._save()
        self._parts.meter.start()
        self._meet()
        if self._is_leader:
            self._measure()
        while not self._is_over:
            self._meetings.touch()
            row = None if self._is_leaving() else self._next_row()
            if row is not None:
                self._train_on(row)
            elif self._has_waited():
                self._bring_the_rest()
            if self._is_leader and self._is_measure_due():
                self._measure()
        self.phase = "draining"
        if self._is_leader:
            self._measure()
        self._end()

    def _is_leaving(self) -> bool:
        is_leaving = self._stop.is_set() or self._is_finished()
        if is_leaving and self._leaving_since is None:
            self._leaving_since = time.monotonic()
        return is_leaving

    def _is_settled(self) -> bool:
        return self._parts.rings.is_settled and not self._parts.feed.has_staged

    def _has_waited(self) -> bool:
        """Whether to meet the others without a row."""
        waited = time.monotonic() - self._idle_since
        return (
            self._is_leaving()
            or self._is_settled()
            or self._must_save.is_set()
            or waited >= self._table.sync_wait_seconds
        )

    def _train_on(self, row: StagedRow) -> None:
        self._open_tokens += row.used_tokens
        super()._train_on(row)
        self._idle_since = time.monotonic()

    def _update(self) -> None:
        """So many micro-steps as accumulate are done: step, alone or with all others."""
        if not self._is_local:
            self._num_open = self._config.training.accumulation
            while self._num_open and not self._is_over:
                self._meet()
            return
        self._step(max(self._position.num_rows, self._lineage.position))
        self._alone |= self._pending
        self._num_tokens += self._open_tokens
        self._pending, self._open_tokens = set(), 0
        self._log_if_due()
        while self._progress.step - self._lineage.step >= self._table.sync_steps:
            if self._meet() or self._is_over:
                return

    def _bring_the_rest(self) -> None:
        """Meet with what there is, less than a worker with rows would bring."""
        rest = self._num_micro % self._config.training.accumulation
        if not self._is_local:
            self._num_open = rest
        elif rest and (self._is_leaving() or self._is_settled()) and not self._is_finished():
            self._num_micro = 0
            self._update()
        self._meet()

    # -- the meeting -----------------------------------------------------------------------------

    def _meet(self) -> bool:
        """Meet once; return whether it came to its end."""
        self._take_saved()
        patience = self._leave_seconds if self._is_leaving() else None
        self._parts.meter.clock.begin_meeting()
        try:
            self._hold(self._meetings.open(self._lineage.step, patience))
        except PeerLostError as error:
            self._meetings.fail(error)
            self._is_over = self._is_over or self._has_left_in_vain()
            return False
        finally:
            self._parts.meter.clock.end_meeting()
        self._idle_since = time.monotonic()
        return True

    def _hold(self, meeting: Meeting) -> None:
        words = Words(meeting, self._word(meeting))
        check_agreement(meeting, words, self._agreement)
        if words.are_behind_disk:
            self._catch_up()
            words = Words(meeting, self._word(meeting))
        self._is_leader = meeting.rank == 0
        self._parts.meter.num_members = meeting.size
        self._lineage.position = max(word.position for word in words.current)
        if not words.behind:
            self._commit(max(word.saved_step for word in words.all))
        self._exchange_and_heal(meeting, words)
        self._is_fresh = False
        self._is_over = self._may_go(words)
        if self._is_leader and not self._is_over:
            self._save_where_due(words)
        if words.all[meeting.rank].must_save:
            self._must_save.clear()

    def _word(self, meeting: Meeting) -> Word:
        lineage = self._lineage
        return Word(
            meeting=hash_of(meeting.quorum.key),
            agreement=hash_of(str(sorted(self._agreement.items()))),
            is_fresh=self._is_fresh,
            step=lineage.step,
            lineage=lineage.number,
            num_micro=self._num_open,
            num_steps=self._progress.step - lineage.step,
            num_rows=len(self._brought()),
            num_tokens=self._num_tokens if self._is_local else self._open_tokens,
            position=max(self._position.num_rows, lineage.position),
            saved_step=lineage.saved_step,
            disk_step=self._parts.store.newest_step(),
            is_settled=self._is_settled(),
            is_leaving=self._is_leaving(),
            is_drained=self._parts.rings.is_drained,
            must_save=self._must_save.is_set(),
        )

    def _brought(self) -> set[int]:
        return self._alone if self._is_local else self._pending

    def _exchange_and_heal(self, meeting: Meeting, words: Words) -> None:
        """Sum; only then, where weights are summed, may one who is behind take them."""
        if not self._is_local:
            self._heal(meeting, words)
        num_steps = words.num_steps(self._is_local)
        rows = gather_rows(meeting, words, self._brought())
        if num_steps:
            if meeting.size > 1:
                share = words.shares(self._is_local)[meeting.rank]
                meeting.sum(self._exchange.load(share, meeting.place))
            is_healed_later = self._is_local and meeting.rank in words.behind
            if not is_healed_later:
                if meeting.size > 1:
                    self._exchange.take()
                self._lineage.advance(meeting, words, num_steps, rows)
                self._apply(self._brought())
        if self._is_local:
            self._heal(meeting, words)

    def _apply(self, mine: set[int]) -> None:
        """The sum is in place: step with it, or from it; these rows of this worker are in it."""
        lineage = self._lineage
        if self._is_local:
            self._progress.step = lineage.step
            self._alone = set()
        else:
            self._step(lineage.position)
            self._num_open = self._num_micro = 0
            self._pending, self._open_tokens = set(), 0
            self._log_group()
        self._num_tokens = 0
        self._parts.rings.mark_consumed(mine)
        self._uncommitted.append((lineage.step, mine))
        self._log_weights(mine)

    def _log_weights(self, mine: set[int]) -> None:
        """Say which weights these are: equal lineages have equal ones."""
        if _log.isEnabledFor(logging.DEBUG):
            digest = digest_of(self._parts.trainee.optimizer.masters)
            lineage = {"lineage": self._lineage.number, "step": self._lineage.step}
            _log.debug(
                "weights %s", json.dumps({**lineage, "digest": digest, "rows": sorted(mine)})
            )

    def _log_group(self) -> None:
        """Log figures of all members' tokens together."""
        sums, norm = self._parts.stepper.take_sums()
        taken = torch.tensor(sums, dtype=torch.float64)
        self._sums = taken if self._sums is None else self._sums + taken
        if self._progress.step % self._config.training.log_steps == 0:
            total, self._sums = self._sums.tolist(), None
            self._log_figures(total, norm)

    def _heal(self, meeting: Meeting, words: Words) -> None:
        """Bring those who are behind to the source's state; all take part, so that all wait."""
        if not words.behind:
            return
        optimizer = self._parts.trainee.optimizer
        began_at = time.monotonic()
        found = heal(meeting, words, self._lineage, optimizer.state())
        if meeting.rank not in words.behind or found is None:
            return
        lineage, state = found
        optimizer.load_state(state)
        self._parts.stepper.forget()
        self._adopt(lineage)
        self._write_metrics(is_resumed=True)
        _log.info(
            "healed by member %d to step %d in %.2f s",
            words.source, lineage.step, time.monotonic() - began_at,
        )  # fmt: skip

    def _catch_up(self) -> None:
        """Those who made the newest checkpoint are gone, and its rows are committed: go on from it."""
        newest = self._parts.store.newest()
        if newest is None:
            raise PeerLostError("the newest checkpoint has gone")
        tensors, state = read_trainer(newest)
        self._parts.trainee.optimizer.load_state(tensors)
        self._parts.stepper.forget()
        lineage = Lineage.of_checkpoint(
            state.step, state.trained_rows, state.trained_tokens, state.consumed, is_saved=True
        )
        lineage.rows |= set(range(self._parts.rings.consumed.low, state.consumed.low))
        self._adopt(lineage)
        # Who wrote it may have died before the targets knew.
        self._parts.rings.mark_consumed(lineage.rows)
        self._uncommitted = [(lineage.step, set(lineage.rows))]
        self._write_metrics(is_resumed=True)
        _log.info("goes on from %s, which is further than anybody here", newest)

    def _adopt(self, lineage: Lineage) -> None:
        """The weights are those of another member: so is what is in them."""
        mine = self._alone | self._pending | {s for _, rows in self._uncommitted for s in rows}
        kept = mine & lineage.rows
        self._parts.rings.mark_consumed(kept)
        self._parts.rings.forget(mine - kept)
        self._lineage, self._uncommitted = lineage, [(lineage.step, kept)]
        self._alone, self._pending = set(), set()
        self._num_open = self._num_micro = self._num_tokens = self._open_tokens = 0
        self._progress.step, self._sums = lineage.step, None
        self._saved_step = lineage.saved_step
        self._log_weights(set())

    # -- checkpoints, and the end ----------------------------------------------------------------

    def _commit(self, saved_step: int) -> None:
        """Every member has the weights of this checkpoint, or later ones: its rows are safe."""
        self._lineage.saved_step = saved_step
        durable = [rows for step, rows in self._uncommitted if step <= saved_step]
        if durable:
            self._parts.rings.mark_committed(set().union(*durable))
            self._uncommitted = [item for item in self._uncommitted if item[0] > saved_step]
            low = self._parts.rings.consumed.low
            self._lineage.rows = {row for row in self._lineage.rows if row >= low}

    def _save_where_due(self, words: Words) -> None:
        """Begin a checkpoint; at an end of anybody's, wait for it, so that the rows can be committed."""
        lineage, steps = self._lineage, self._config.training.checkpoint_steps
        if lineage.step <= lineage.saved_step:
            return
        is_end = any(w.is_leaving for w in words.all) or all(w.is_settled for w in words.all)
        is_due = lineage.step // steps > max(lineage.saved_step, 0) // steps
        is_wanted = is_end or any(word.must_save for word in words.all)
        if is_wanted or (is_due and not self._saver.is_busy):
            self._save()
        if is_end:
            self._take_saved(waits=True)

    def _save(self) -> None:
        """Begin the group's checkpoint; rows are committed at a meeting after it is written."""
        lineage = self._lineage
        if self._saved_step == lineage.step:
            return
        consumed = self._parts.rings.consumed
        progress = Progress(lineage.step, lineage.trained_rows, lineage.trained_tokens)
        contained = consumed.of((*consumed.above, *lineage.rows), low=consumed.low)
        self._begin_save(progress, contained, partial(lineage.note_saved, lineage.step))

    def _note_full_disk(self, reason: str) -> None:
        super()._note_full_disk(reason)
        self._meetings.touch()

    def _may_go(self, words: Words) -> bool:
        """Whether nobody needs this worker, nor it the others."""
        if all(word.is_drained for word in words.all):
            return True
        # Exchanges without a row of this worker need no checkpoint of their own.
        is_safe = not self._brought() and not any(rows for _, rows in self._uncommitted)
        return (self._is_leaving() and is_safe and not words.behind) or self._has_left_in_vain()

    def _has_left_in_vain(self) -> bool:
        if not self._is_leaving() or self._leaving_since is None:
            return False
        return time.monotonic() - self._leaving_since > self._leave_seconds


def digest_of(tensors: list[Tensor]) -> str:
    """Return what is equal for equal tensors; copies them to the host."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
