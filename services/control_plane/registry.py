"""What the control plane knows of a run, from heartbeats alone.

    session unknown --heartbeat--> known --heartbeat with a higher number--> known
    known --goodbye--> ended          ended: later messages are counted and change nothing

Heartbeats carry whole states, so a registry that starts empty knows everything again after one
interval. A session that registers under the name of an ended or silent one takes its place; of
one that is alive it does not, so two processes with one name are both seen.
"""

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.config.shared import PlacementTable
from common.contracts.control_messages import (
    Command,
    CommandName,
    EvaluationResult,
    EvaluatorReport,
    Report,
    ServiceGoodbye,
    ServiceHeartbeat,
    ServiceKind,
    ServiceReply,
    WorkerReport,
)
from common.contracts.placement_messages import GpuGrant, GpuRefusal
from common.placement.policy import PlacementPolicy
from services.control_plane.health import Condition, is_silent, is_stalled
from services.control_plane.leases import Lease, PlacesView, answer_claim, view_places
from services.control_plane.trained import Trained, TrainedMarks
from services.control_plane.windows import Window

# What holds a GPU is heard of within the first; the second is for one that was lost.
_HEARD_INTERVALS = 2.0
_ANY_GPU = PlacementTable()
_KEPT_ERRORS = 100
_KEPT_PACES = 10
_EVERY_KIND: tuple[ServiceKind, ...] = ("target_server", "drafter_worker", "evaluator")
_RECIPIENTS: dict[CommandName, tuple[ServiceKind, ...]] = {
    "pause": ("target_server", "drafter_worker"),
    "resume": ("target_server", "drafter_worker"),
    "drain": ("drafter_worker",),  # they take no more; a target with nobody to serve waits
    "stop": _EVERY_KIND,
    "checkpoint": ("drafter_worker",),
    "evaluate": ("evaluator",),
    "stacks": _EVERY_KIND,
}
# For the sessions of their moment alone; the others hold for the run, whoever comes later.
_MOMENTARY: tuple[CommandName, ...] = ("checkpoint", "evaluate", "stacks")


@dataclass
class Instance:
    """One session of a service; owned by the registry, which changes it under its lock."""

    heartbeat: ServiceHeartbeat
    seen_at: float
    progressed_at: float
    goodbye: ServiceGoodbye | None = None
    window: Window = field(default_factory=Window)
    worked_at: float | None = None
    """When progress last rose."""
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_PACES))
    """Seconds a unit of work, of the last rises of progress."""
    errors: set[str] = field(default_factory=set)
    inherited: WorkerReport | None = None
    """The last one of the worker whose place it has taken."""
    granted: str = ""
    """UUID of the GPU that it was granted last."""
    commands: dict[CommandName, Command] = field(default_factory=dict)
    """The last of each name that this session was meant by, beside those for the run."""


@dataclass(frozen=True)
class InstanceView:
    """An instance as it was when a snapshot was taken."""

    heartbeat: ServiceHeartbeat
    goodbye: ServiceGoodbye | None
    condition: Condition
    age_seconds: float
    progress_age_seconds: float
    wait_share: float | None
    """Share of the last seconds that it spent blocked or starved; None while it does not run."""
    tokens_per_second: float | None
    """Over the same seconds."""
    told: Report | None
    """Its report, or until it has one that of the worker whose place it has taken."""


@dataclass(frozen=True)
class ErrorView:
    """An error that an instance reported."""

    instance: str
    text: str
    age_seconds: float


@dataclass(frozen=True)
class Snapshot:
    """Everything known at one moment."""

    instances: tuple[InstanceView, ...]
    evaluations: tuple[EvaluationResult, ...]
    errors: tuple[ErrorView, ...]
    refused: dict[str, int]
    run_command: Command | None
    """The last command for the whole run, which also holds for sessions that come later."""
    uptime_seconds: float
    places: PlacesView
    trained: dict[str, Trained]
    """By group."""


class Registry:
    """Takes heartbeats and goodbyes, gives replies and snapshots; safe to call from any thread."""

    def __init__(
        self,
        run: str,
        heartbeat_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        placement: PlacementTable = _ANY_GPU,
    ) -> None:
        self._run = run
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._policy = PlacementPolicy(placement)
        self._started_at = clock()
        self._lock = threading.Lock()
        self._instances: dict[int, Instance] = {}
        self._evaluations: dict[tuple[str, str, float], EvaluationResult] = {}
        self._errors: deque[tuple[float, str, str]] = deque(maxlen=_KEPT_ERRORS)
        self._refused: Counter[str] = Counter()
        self._run_command: Command | None = None
        self._last_number = 0
        self._trained = TrainedMarks()

    def take_heartbeat(self, beat: ServiceHeartbeat) -> ServiceReply | None:
        """Note a heartbeat and return the reply, or None where it is refused."""
        with self._lock:
            instance = self._instances.get(beat.session)
            refusal = _why_refused(beat, instance, self._run)
            if refusal is not None:
                self._refused[refusal] += 1
                return None
            # Each time, since a process that was killed is silent only after its successor came.
            inherited = self._forget_predecessors(beat)
            instance = instance or self._register(beat)
            instance.inherited = inherited or instance.inherited
            self._note(beat, instance)
            return ServiceReply(
                session=beat.session, number=beat.number,
                heartbeat_seconds=self._heartbeat_seconds, commands=self._commands_for(instance),
                place=self._place(instance),
            )  # fmt: skip

    def take_goodbye(self, goodbye: ServiceGoodbye) -> None:
        """Note the end of a session; of an unknown one it changes nothing."""
        with self._lock:
            instance = self._instances.get(goodbye.session)
            if instance is None or instance.goodbye is not None:
                self._refused["unknown_session" if instance is None else "ended_session"] += 1
                return
            instance.goodbye = goodbye
            if goodbye.exit_code:
                self._add_error(instance, f"exit code {goodbye.exit_code}: {goodbye.reason}")

    def refuse(self, reason: str) -> None:
        """Count a message that could not be decoded."""
        with self._lock:
            self._refused[reason] += 1

    def add_evaluations(self, results: Iterable[EvaluationResult]) -> None:
        """Note results that were written before this control plane started."""
        with self._lock:
            self._note_evaluations(results)

    def command(self, name: CommandName) -> tuple[Command, int]:
        """Give a command to the run; return it and the number of sessions that will get it."""
        with self._lock:
            command = self._next_command(name)
            live = self._live(name)
            if name not in _MOMENTARY:
                self._run_command = command
            else:
                _address(command, live)
            return command, len(live)

    def command_those(
        self, name: CommandName, is_meant: Callable[[ServiceHeartbeat], bool]
    ) -> tuple[Command, int] | None:
        """Give a command to some of the live sessions; return None where there is none."""
        with self._lock:
            live = [instance for instance in self._live(name) if is_meant(instance.heartbeat)]
            if not live:
                return None
            command = self._next_command(name)
            _address(command, live)
            return command, len(live)

    def snapshot(self) -> Snapshot:
        """Return everything known at this moment."""
        with self._lock:
            now = self._clock()
            views = tuple(self._view(instance, now) for instance in self._instances.values())
            return Snapshot(
                instances=views,
                evaluations=tuple(self._evaluations.values()),
                errors=tuple(ErrorView(name, text, now - at) for at, name, text in self._errors),
                refused=dict(self._refused),
                run_command=self._run_command,
                uptime_seconds=now - self._started_at,
                places=view_places(self._policy, self._leases().values()),
                trained=self._trained.note((view.heartbeat.instance, view.told) for view in views),
            )

    def _next_command(self, name: CommandName) -> Command:
        # The clock's milliseconds, so that numbers rise over restarts of the control plane.
        self._last_number = max(self._last_number + 1, time.time_ns() // 1_000_000)
        return Command(name=name, number=self._last_number)

    def _live(self, name: CommandName) -> list[Instance]:
        """Return the sessions that a command of this name reaches."""
        return [
            instance for instance in self._instances.values()
            if instance.heartbeat.service in _RECIPIENTS[name]
            and self._condition(instance) in ("ok", "stalled")
        ]  # fmt: skip

    def _forget_predecessors(self, beat: ServiceHeartbeat) -> WorkerReport | None:
        """Return what the worker said last whose place is taken, if it is one."""
        last = None
        for session, other in list(self._instances.items()):
            is_same = _name(other.heartbeat) == _name(beat) and session != beat.session
            if is_same and self._condition(other) in ("silent", "ended", "failed"):
                del self._instances[session]
                report = other.heartbeat.report
                last = report if isinstance(report, WorkerReport) else other.inherited
        return last

    def _register(self, beat: ServiceHeartbeat) -> Instance:
        now = self._clock()
        instance = Instance(heartbeat=beat, seen_at=now, progressed_at=now)
        self._instances[beat.session] = instance
        return instance

    def _note(self, beat: ServiceHeartbeat, instance: Instance) -> None:
        now = self._clock()
        before = instance.heartbeat
        if (beat.progress, beat.phase) != (before.progress, before.phase):
            instance.progressed_at = now
        _note_pace(instance, now, beat.progress - before.progress)
        instance.heartbeat = beat
        instance.seen_at = now
        instance.window.note(now, beat)
        for text in (*beat.errors, *((beat.detail,) if beat.phase == "failed" else ())):
            self._add_error(instance, text)
        if isinstance(beat.report, EvaluatorReport):
            self._note_evaluations(beat.report.results)

    def _note_evaluations(self, results: Iterable[EvaluationResult]) -> None:
        for result in results:
            self._evaluations[result.checkpoint, result.arm, result.temperature] = result

    def _add_error(self, instance: Instance, text: str) -> None:
        if text not in instance.errors:
            instance.errors.add(text)
            self._errors.append((self._clock(), instance.heartbeat.instance, text))

    def _commands_for(self, instance: Instance) -> tuple[Command, ...]:
        """Repeat what holds for the run, also to sessions that come later, and what this session
        was meant by; a session acts on each number once."""
        given = self._run_command
        is_for_it = given and instance.heartbeat.service in _RECIPIENTS[given.name]
        return (*((given,) if given and is_for_it else ()), *instance.commands.values())

    def _place(self, instance: Instance) -> GpuGrant | GpuRefusal | None:
        """Answer a claim to a GPU and note what is granted."""
        claim = instance.heartbeat.claim
        if claim is None or claim.held:
            return None
        age = self._clock() - self._started_at
        if age < _HEARD_INTERVALS * self._heartbeat_seconds:
            return GpuRefusal(
                reason=f"the control plane started {age:.1f} s ago and first hears who has which GPU"
            )
        leases = self._leases()
        own = leases.pop(instance.heartbeat.session)
        answer = answer_claim(self._policy, own, leases.values())
        instance.granted = answer.gpu_uuid if isinstance(answer, GpuGrant) else ""
        return answer

    def _leases(self) -> dict[int, Lease]:
        """Return what each session that is heard of has, or may yet take, of the GPUs."""
        now = self._clock()
        return {
            session: Lease(instance.heartbeat, instance.granted)
            for session, instance in self._instances.items()
            if instance.goodbye is None
            and not is_silent(now - instance.seen_at, self._heartbeat_seconds)
        }

    def _view(self, instance: Instance, now: float) -> InstanceView:
        return InstanceView(
            heartbeat=instance.heartbeat,
            goodbye=instance.goodbye,
            condition=self._condition(instance),
            age_seconds=now - instance.seen_at,
            progress_age_seconds=now - instance.progressed_at,
            wait_share=instance.window.wait_share,
            tokens_per_second=instance.window.tokens_per_second,
            told=instance.heartbeat.report or instance.inherited,
        )

    def _condition(self, instance: Instance) -> Condition:
        now = self._clock()
        beat = instance.heartbeat
        if instance.goodbye is not None:
            return "failed" if instance.goodbye.exit_code else "ended"
        if beat.phase == "failed":
            return "failed"
        if is_silent(now - instance.seen_at, self._heartbeat_seconds):
            return "silent"
        stalled = is_stalled(
            beat.phase, now - instance.progressed_at, _pace(instance), instance.window.wait_share
        )
        return "stalled" if stalled else "ok"


def _address(command: Command, instances: Iterable[Instance]) -> None:
    for instance in instances:
        instance.commands[command.name] = command


def _name(beat: ServiceHeartbeat) -> tuple[str, str]:
    return beat.service, beat.instance


def _why_refused(beat: ServiceHeartbeat, known: Instance | None, run: str) -> str | None:
    if beat.run != run:
        return "foreign_run"
    if known is not None and known.goodbye is not None:
        return "ended_session"
    if known is not None and beat.number <= known.heartbeat.number:
        return "stale_number"
    return None


def _note_pace(instance: Instance, now: float, num_units: int) -> None:
    if num_units <= 0:
        return
    if instance.worked_at is not None:
        instance.paces.append((now - instance.worked_at) / num_units)
    instance.worked_at = now


def _pace(instance: Instance) -> float | None:
    """Return the median seconds of a unit of work, as seen here or as the worker says of a step."""
    report = instance.heartbeat.report
    step = report.step_seconds if isinstance(report, WorkerReport) else 0.0
    seen = statistics.median(instance.paces) if instance.paces else 0.0
    return max(step, seen) or None
