"""The drafter worker's loop.

    target server ==ring==> RowFeed ==staged row==> Stepper ==state==> CheckpointStore
                                (prefetch thread)    (main thread)       (saver thread)

    consumes  staged rows          produces  optimizer steps, metrics, checkpoints
    waits for a staged row (bounded)         unblocked by  a row, the end of the stream, a stop

A row is consumed with the optimizer step that includes its last visit, and committed with the
checkpoint that holds that step; only then does the target server forget how to make it again.
Checkpoints, measures and lines of metrics come at multiples of their intervals, and a checkpoint never
parts the visits of a row: on a CPU, what follows a resume is bit-equal to what a straight run does.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.contracts.control_messages import Command, Phase
from common.contracts.sequences import SequenceSet
from common.disk import write_with_patience
from common.drafters.dflash.checkpoint import write_drafter
from common.drafters.dflash.metrics import unpack_sums
from common.errors import NonFiniteTensorError
from common.lifecycle import write_atomically
from common.ring.worker_rings import WorkerRings
from common.telemetry.control_link import ServiceState
from common.telemetry.metrics import MetricsLog
from services.drafter_worker.build import Trainee
from services.drafter_worker.checkpoint import CheckpointStore, TrainerState
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.feed import RowFeed, StagedRow
from services.drafter_worker.held_out import HeldOut
from services.drafter_worker.meter import Meter, Progress
from services.drafter_worker.saver import Save, Saver, on_host
from services.drafter_worker.schedule import Schedule, StreamPosition
from services.drafter_worker.step import Stepper

WAIT_SECONDS = 0.2
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a worker is made of."""

    trainee: Trainee
    rings: WorkerRings
    feed: RowFeed
    stepper: Stepper
    store: CheckpointStore
    meter: Meter
    metrics: MetricsLog
    open_held_out: Callable[[], HeldOut | None]
    run: dict[str, Any]
    summary: Path


class DrafterWorker:
    """Trains one drafter on its share of the rows."""

    def __init__(self, config: WorkerConfig, parts: Parts, stop: threading.Event) -> None:
        self._config = config
        self._parts = parts
        self._progress = parts.trainee.progress
        self._stop = stop
        self._schedule = Schedule(config.optimizer, parts.rings.total_rows)
        self._position = StreamPosition(config.target.replicas, parts.trainee.consumed)
        self._num_micro = 0
        self._pending: set[int] = set()
        self._pending_tokens = 0
        """Row tokens of `_pending`: rows that no step contains yet."""
        self._saver = Saver()
        self._saved_step = self._progress.step if parts.trainee.is_resumed else -1
        """Of the newest checkpoint that is written or being written."""
        self._contained: set[int] = set()
        """Rows of steps that no such checkpoint contains."""
        self._measured_step = -1
        self._held_out: HeldOut | None = None
        self._must_save = threading.Event()
        self._paused = threading.Event()
        self.phase: Phase = "running"
        self._hindrance = ""
        """Why the worker waits for its disk."""

    def run(self) -> None:
        """Train until the stream is drained, `max_steps`, or a stop request."""
        rings, feed = self._parts.rings, self._parts.feed
        if self._parts.trainee.is_resumed:
            self._go_on()
        else:
            self._save()
        self._measure()
        self._parts.meter.start()
        while not self._stop.is_set() and not self._is_finished():
            row = self._next_row()
            if row is not None:
                self._train_on(row)
            elif rings.is_settled and not feed.has_staged:
                self._commit_rest()
                if rings.is_drained:
                    break
            if self._is_measure_due():
                self._measure()
            self._take_saved()
            if self._is_between_rows() and (self._must_save.is_set() or self._is_checkpoint_due()):
                self._must_save.clear()
                self._save()
        self.phase = "draining"
        self._commit_rest()
        self._measure()
        self._end()

    def _end(self) -> None:
        """Nothing is left to do: leave the figures, and tell targets whether more rows are wanted."""
        self._write_summary()
        if self._is_finished():
            self._parts.rings.finish()
        self.phase = "done"

    def describe(self) -> ServiceState:
        """Return the worker's state for the control plane."""
        self._parts.meter.graph_replays = self._parts.stepper.num_graph_replays
        self._parts.meter.refused_messages = dict(self._parts.rings.refused_messages)
        detail = self._hindrance or f"step {self._progress.step}"
        report = self._parts.meter.report()
        return ServiceState(self.phase, detail, self._progress.trained_rows, report)

    def obey(self, command: Command) -> None:
        """Note a command of the control plane; the loop acts on it between rows."""
        if command.name in ("stop", "drain"):
            self._stop.set()
        elif command.name == "checkpoint":
            self._must_save.set()
        elif command.name == "pause":
            self._paused.set()
        else:
            self._paused.clear()

    def _is_finished(self) -> bool:
        limit = self._config.training.max_steps
        return 0 < limit <= self._progress.step

    def _is_between_rows(self) -> bool:
        """Whether what no step contains yet is whole rows: those come again, with all their visits."""
        training = self._config.training
        return self._num_micro % training.accumulation % training.visits == 0

    def _is_checkpoint_due(self) -> bool:
        steps = self._config.training.checkpoint_steps
        is_due = self._progress.step // steps > max(self._saved_step, 0) // steps
        return is_due and not self._saver.is_busy

    def _next_row(self) -> StagedRow | None:
        if self._paused.is_set():
            self.phase = "paused"
            self._stop.wait(WAIT_SECONDS)
            return None
        start, clock = time.monotonic(), self._parts.meter.clock
        clock.waits()
        row = self._parts.feed.next_row(WAIT_SECONDS)
        clock.waited(time.monotonic() - start)
        self.phase = "running" if row is not None else "waiting"
        return row

    def _train_on(self, row: StagedRow) -> None:
        """Visit a row; each visit is a micro-step with anchors of its own."""
        training, parts = self._config.training, self._parts
        first_step = self._progress.step
        parts.meter.clock.begin()
        self._position.reach(row.sequence)
        for visit in range(training.visits):
            draw = (self._config.run.seed, row.sequence, visit)
            if visit == 0:
                parts.stepper.load(row.buffers, draw)
            else:
                parts.stepper.draw(draw)
            parts.stepper.micro()
            self._num_micro += 1
            if visit == training.visits - 1:
                self._pending.add(row.sequence)
                self._pending_tokens += row.used_tokens
            if self._num_micro % training.accumulation == 0:
                self._update()
        parts.feed.give_back(row)
        self._progress.trained_rows += 1
        self._progress.trained_tokens += row.used_tokens
        parts.meter.clock.end(self._progress.step - first_step)
        parts.meter.row_done()

    def _update(self) -> None:
        self._step(self._position.num_rows)
        self._parts.rings.mark_consumed(self._pending)
        self._contained |= self._pending
        self._pending, self._pending_tokens = set(), 0
        self._log_if_due()

    def _step(self, num_rows: int) -> None:
        """Apply what has been added, when the stream has come to its row `num_rows`."""
        parts, progress = self._parts, self._progress
        parts.meter.learning_rate = self._schedule.at(progress.step, num_rows)
        parts.stepper.update(parts.meter.learning_rate)
        progress.step += 1
        parts.meter.step_done()

    def _log_if_due(self) -> None:
        if self._progress.step % self._config.training.log_steps == 0:
            self._log_figures(*self._parts.stepper.take_sums())

    def _log_figures(self, sums: list[float], norm: float) -> None:
        """Log the packed sums of the steps since the last time, and the last gradient norm."""
        parts, progress = self._parts, self._progress
        figures = unpack_sums(sums)
        parts.meter.figures, parts.meter.gradient_norm = figures, norm
        parts.meter.dropped_blocks += figures.num_dropped_blocks
        if norm != norm or abs(norm) == float("inf"):
            parts.rings.finish()  # the same config fails again: no other group is to wait for it
            raise NonFiniteTensorError(
                f"step {progress.step}: the gradient norm is {norm}, the update was skipped; "
                f"lower optimizer.learning_rate, or look at the target's features"
            )
        self._write_metrics(
            **asdict(figures),
            learning_rate=parts.meter.learning_rate,
            gradient_norm=norm,
            trained_rows=progress.trained_rows,
            trained_tokens=progress.trained_tokens,
            tokens_per_second=parts.meter.tokens_per_second,
            starved_seconds=parts.meter.clock.starved_seconds,
            sync_seconds=parts.meter.clock.sync_seconds,
        )
        _log.info(
            "step %d loss %.4f accepted prefix %.3f lr %.2e",
            progress.step, figures.loss, figures.accepted_prefix_length, parts.meter.learning_rate,
        )  # fmt: skip

    def _is_measure_due(self) -> bool:
        steps = self._config.held_out.steps
        return self._progress.step // steps > max(self._measured_step, 0) // steps

    def _measure(self) -> None:
        """Measure acceptance on the held-out rows, once a step."""
        meter, step = self._parts.meter, self._progress.step
        if not self._config.held_out.prompts or self._measured_step == step:
            return
        self._measured_step = step
        with self._in_phase("measuring"):
            self._held_out = self._held_out or self._parts.open_held_out()
            if self._held_out is None:
                return
            meter.held_out, meter.held_out_step = self._held_out.measure(), step
        figures = [record.model_dump() for record in meter.held_out]
        self._write_metrics(held_out=figures)
        _log.info(
            "step %d held out: %.3f tokens a pass over %d answers",
            step, meter.held_out[0].acceptance_length, meter.held_out[0].num_answers,
        )  # fmt: skip

    @contextlib.contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        """Say that what goes on is no step, so that nobody misses the progress of one."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _commit_rest(self) -> None:
        """Step with what has been accumulated, and make it durable."""
        if self._num_micro % self._config.training.accumulation and not self._is_finished():
            self._num_micro = 0
            self._update()
        self._save()
        self._take_saved(waits=True)

    def _go_on(self) -> None:
        """Take up the curves where the checkpoint has them, and say so."""
        self._parts.stepper.put_sums(self._parts.trainee.sums)
        self._write_metrics(is_resumed=True)

    def _save(self) -> None:
        """Begin a checkpoint of this step, unless there is one."""
        if self._saved_step == self._progress.step:
            return
        progress, sums = self._progress, self._parts.stepper.read_sums()
        if self._pending:
            sums = ()  # they have figures of rows that come again
        held = Progress(
            progress.step,
            progress.trained_rows - len(self._pending),
            progress.trained_tokens - self._pending_tokens,
        )
        rows, self._contained = self._contained, set()
        commit = partial(self._parts.rings.mark_committed, rows)
        self._begin_save(held, self._parts.rings.consumed, commit, sums)

    def _begin_save(self, progress: Progress, consumed: SequenceSet, then: Callable[[], None],
                    sums: tuple[float, ...] = ()) -> None:  # fmt: skip
        """Begin a checkpoint of weights that contain these rows; `then` follows once it is durable."""
        self._take_saved(waits=True)
        parts, trainee = self._parts, self._parts.trainee
        state = on_host(trainee.optimizer.state())
        masters = trainee.optimizer.masters_of(state)
        names = dict(trainee.drafter.named_parameters())
        write = partial(
            parts.store.save,
            partial(write_drafter, state=dict(zip(names, masters, strict=True)), spec=trainee.spec),
            state,
            TrainerState(**asdict(progress), consumed=consumed, sums=sums),
            {**parts.run, "step": progress.step},
        )
        self._saved_step = progress.step
        self._saver.begin(Save(progress.step, write, then))

    def _take_saved(self, *, waits: bool = False) -> None:
        """See to the checkpoint that was begun, if it is written or `waits`."""
        with self._in_phase("saving") if waits else contextlib.nullcontext():
            taken = self._saver.take(waits=waits)
        if taken is None:
            return
        save, path = taken
        if path is None:
            with self._in_phase("saving"):
                path = self._write_with_patience(save.write)
        self._parts.meter.checkpoint = str(path)
        _log.info("checkpoint %s", path)
        save.then()

    def _write_summary(self) -> None:
        meter, progress = self._parts.meter, self._progress
        summary = {
            **asdict(progress),
            "train_seconds": meter.train_seconds,
            "tokens_per_second": meter.tokens_per_second,
            "starved_seconds": meter.clock.starved_seconds,
            "sync_seconds": meter.clock.sync_seconds,
            "seconds_to_first_step": meter.seconds_to_first_step,
            "compile_seconds": meter.compile_seconds,
            "loss": meter.figures.loss if meter.figures else None,
            "held_out_acceptance_length": (
                meter.held_out[0].acceptance_length if meter.held_out else None
            ),
            "checkpoint": meter.checkpoint,
            "group": meter.group,
            "index": meter.index,
        }
        self._write_with_patience(
            partial(write_atomically, self._parts.summary, json.dumps(summary))
        )

    def _write_metrics(self, **values: object) -> None:
        self._write_with_patience(partial(self._parts.metrics.write, self._progress.step, **values))

    def _write_with_patience(self, write: Callable[[], Result]) -> Result:
        """Write; while the disk is full the worker is paused and says why."""
        phase = self.phase
        result = write_with_patience(write, self._stop, self._note_full_disk)
        self.phase, self._hindrance = phase, ""
        return result

    def _note_full_disk(self, reason: str) -> None:
        self.phase, self._hindrance = "paused", reason
