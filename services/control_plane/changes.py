"""Tells what has happened between two statuses of a run: joins, ends, alarms, errors, checkpoints.

Pure: of the two statuses alone. Commands are no part of it, since two may fall between them; the
routes note those themselves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from services.control_plane.status import EvaluationStatus, InstanceStatus, Model, Status

EventKind = Literal[
    "control", "state", "join", "leave", "watchdog", "command", "checkpoint", "evaluation", "alarm",
    "error",
]  # fmt: skip
MAX_TEXT = 1000


class Event(Model):
    """Something that has happened to the run."""

    time: float
    """Seconds since 1970, as of the status that showed it."""
    kind: EventKind
    instance: str
    """Whom it is about; empty for the run as a whole."""
    text: str


def find_changes(before: Status, after: Status) -> list[Event]:
    """Return what is in `after` and was not in `before`."""
    changes = [
        *_state_changes(before, after),
        *_instance_changes(before, after),
        *_checkpoint_changes(before, after),
        *_evaluation_changes(before, after),
        *_error_changes(before, after),
    ]
    return [make_event(after.time, kind, name, text) for kind, name, text in changes]


def make_event(time: float, kind: EventKind, instance: str, text: str) -> Event:
    """Return an event whose text is bounded, as other processes write some of it."""
    short = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
    return Event(time=time, kind=kind, instance=instance, text=short)


_Change = tuple[EventKind, str, str]


def _state_changes(before: Status, after: Status) -> Iterator[_Change]:
    if before.run.state != after.run.state:
        yield "state", "", f"{before.run.state} -> {after.run.state}"


def _instance_changes(before: Status, after: Status) -> Iterator[_Change]:
    known = {view.session: view for view in _instances(before)}
    troubles = {(found.service, found.instance): found.text for found in after.overdue}
    for view in _instances(after):
        earlier = known.get(view.session)
        if earlier is None:
            yield "join", view.instance, f"{view.service}, pid {view.pid} on {view.host}"
        was = earlier.condition if earlier else "ok"
        if view.condition != was:
            yield _condition_change(view, was, troubles.get((view.service, view.instance), ""))


def _instances(status: Status) -> Iterable[InstanceStatus]:
    return (*status.target.instances, *status.workers, *status.evaluators)


def _condition_change(view: InstanceStatus, was: str, trouble: str) -> _Change:
    if view.condition == "ended":
        return "leave", view.instance, view.exit_reason or "ended"
    if view.condition == "failed":
        return "leave", view.instance, f"failed: {view.exit_reason or view.detail}"
    if view.condition == "ok":
        return "watchdog", view.instance, f"back from {was}, in phase {view.phase}"
    return "watchdog", view.instance, trouble or view.condition


def _checkpoint_changes(before: Status, after: Status) -> Iterator[_Change]:
    known = {group.group: group.last_checkpoint for group in before.groups}
    for group in after.groups:
        if group.last_checkpoint and group.last_checkpoint != known.get(group.group):
            yield "checkpoint", group.group, group.last_checkpoint.rpartition("/checkpoints/")[2]


def _evaluation_changes(before: Status, after: Status) -> Iterator[_Change]:
    known = {_key(result) for result in before.evaluations}
    for result in after.evaluations:
        if _key(result) not in known:
            text = f"acceptance length {result.acceptance_length:.3f} at step {result.step}"
            text += f" (arm {result.arm}, temperature {result.temperature:g})"
            yield "evaluation", result.group, text
    alarms = {(alarm.group, alarm.index, alarm.step) for alarm in before.alarms}
    for alarm in after.alarms:
        if (alarm.group, alarm.index, alarm.step) not in alarms:
            yield "alarm", alarm.group, f"step {alarm.step}: {alarm.text}"


def _key(result: EvaluationStatus) -> tuple[str, str, float]:
    return result.checkpoint, result.arm, result.temperature


def _error_changes(before: Status, after: Status) -> Iterator[_Change]:
    told = Counter((error.instance, error.text) for error in before.errors)
    for error in after.errors:
        if told[error.instance, error.text] == 0:
            yield "error", error.instance, error.text
        told[error.instance, error.text] -= 1
