"""Trackers that show curves elsewhere: TensorBoard, wandb, trackio. The run's JSON lines are the source.

Each is an extra that is imported where a config names it. What one cannot write is lost to it alone.
"""

import hashlib
import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from common.errors import ConfigError

TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "ringdraft"
_FLUSH_SECONDS = 10
_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Somewhere that curves are shown."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take over one record of the JSON lines."""

    def close(self) -> None:
        """Write what is left."""


def check_installed(names: Sequence[TrackerName]) -> None:
    """Raise `ValueError` that names the extra of a tracker which is not installed. Imports nothing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"got {name!r}, which is not installed: install ringdraft with its extra `{name}`, "
                f"or drop it"
            )


def open_trackers(
    names: Sequence[TrackerName], directory: Path, instance: str, config: Mapping[str, Any]
) -> list[Tracker]:
    """Open a process's trackers.

    Args:
        directory: the run's; its name is that of the run elsewhere.
        config: what the process was given, for trackers that show it.
    """
    return [_OPENERS[name](directory, instance, config) for name in names]


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers by name: lists count from 1, tables are named by their texts."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if name not in ("time", "step"):
            found.update(_numbers(name, value))
    return found


class TensorBoard:
    """Event files in `<run>/tensorboard/<instance>`."""

    def __init__(self, directory: Path, instance: str, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = directory / "tensorboard" / instance
        self._writer: Any = None
        self._is_lost = False
        try:
            self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)
        except OSError as error:
            self._lose(error)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add an event; one that says where training goes on hides the lost steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        at = {"wall_time": record.get("time", time.time()), "step": record["step"]}
        if record.get("is_resumed"):
            start = SessionLog(status=SessionLog.START)
            self._add(Event(**{**at, "step": record["step"] + 1}, session_log=start))
            return
        values = [Summary.Value(tag=k, simple_value=v) for k, v in flatten(record).items()]
        self._add(Event(**at, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush, and end the writer's thread."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._lose(error)

    def _add(self, event: Any) -> None:
        if self._is_lost:
            return
        try:
            self._writer.add_event(event)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._is_lost = True
        _log.warning("tensorboard: events cannot be written and end here: %s", error)


class Wandb:
    """A run of wandb's project `ringdraft`, under `<run>/wandb`; WANDB_MODE and the like are its own."""

    def __init__(self, directory: Path, instance: str, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=PROJECT, group=directory.name, name=f"{directory.name}/{instance}",
                id=_run_id(directory, instance), resume="allow", dir=str(directory),
                config=dict(config), settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise ConfigError(
                f"training.trackers 'wandb' cannot start: {error}; log in with `wandb login`, set "
                f"WANDB_MODE=offline, or drop it"
            ) from error
        # Its own steps never fall; ours do where training goes on from a checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand over a record's numbers."""
        if figures := flatten(record):
            self._run.log({"step": record["step"], **figures})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Trackio:
    """A run of trackio's project `ringdraft`; TRACKIO_DIR and the like are its own."""

    def __init__(self, directory: Path, instance: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT, group=directory.name, name=f"{directory.name}/{instance}",
            resume="allow", config=dict(config), auto_log_gpu=False, embed=False,
        )  # fmt: skip

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand over a record's numbers."""
        if figures := flatten(record):
            self._run.log(figures, step=record["step"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()


_OPENERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def _run_id(directory: Path, instance: str) -> str:
    """Return the same name in each life of a process."""
    return hashlib.sha256(f"{directory.resolve()}/{instance}".encode()).hexdigest()[:16]


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        texts = [text for text in value.values() if isinstance(text, str) and text]
        for key, item in value.items():
            yield from _numbers("/".join([name, *(texts or ["all"]), key]), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value, 1):
            is_table = isinstance(item, Mapping)
            yield from _numbers(name if is_table else f"{name}/{number}", item)
