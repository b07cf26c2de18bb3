"""Tables that the launcher reads."""

from typing import Any, Literal

from pydantic import Field

from common.config.loading import Table
from common.config.shared import ControlPlaneTable, Groups, GroupTable, RunTable, TargetTable


class LauncherTable(Table):
    """[launcher]: how `ringdraft up` runs the services."""

    workers: int = Field(default=1, ge=1, le=64)
    """Drafter workers of each group that has no number of its own."""
    restart: Literal["never", "on-failure"] = "never"
    """Whether a service that failed is started again; "never" stops the run."""
    max_restarts: int = Field(default=3, ge=1)
    """Restarts of one service before its failure stops the run."""
    on_worker_failure: Literal["stop", "go_on"] = "stop"
    """What a worker's failure, after its restarts, means while others train: the run's end, or theirs
    is waited for. Config that a worker refuses ends the run either way; a worker that no GPU has room
    for ends it only where it is the last."""
    restart_delay_seconds: float = Field(default=1.0, ge=0)
    """Pause before a restart; doubles with each of a service."""
    stuck_seconds: float = Field(default=0.0, ge=0)
    """How long a service may be silent or stalled, as /status says, before it writes its stacks into its
    log, is killed, and counts as one that failed; 0: for ever. One that has made no step or row yet is
    given `start_seconds`."""
    start_seconds: float = Field(default=1200.0, gt=0)
    """How long a service that loads or compiles, and has made no step or row yet, may be silent or stalled
    before `stuck_seconds` would end it; no less than that."""
    evaluate: bool = True
    """Whether the first and last checkpoints are evaluated when training has ended."""
    follow: bool = False
    """Whether an evaluator runs beside training and evaluates each checkpoint as it comes; it needs
    room for a second copy of the target."""
    finish_seconds: float = Field(default=15.0, gt=0)
    """How long a target may outlive the last worker before it is asked to stop."""
    grace_seconds: float = Field(default=60.0, gt=0)
    """How long a service may take to stop before it is killed."""
    passive_threads: bool = False
    """Whether OpenMP threads sleep while they wait; for services that share their cores."""


class SweepTable(Table):
    """[sweep]: a group for each combination of values, all of them on one stream."""

    grid: dict[str, Any] = Field(min_length=1)
    """Lists of values by key of [drafter], [optimizer] or [training]."""
    group: GroupTable = GroupTable()
    """[sweep.group]: what every group has, such as policy and workers."""
    max_groups: int = Field(default=16, ge=1, le=256)
    """Most groups that the machine holds at once: each is a process with a drafter of its own."""


class LauncherConfig(Table):
    """What the launcher is told; each service validates its own tables."""

    run: RunTable = RunTable()
    target: TargetTable
    groups: Groups = {"main": GroupTable()}
    control_plane: ControlPlaneTable = ControlPlaneTable()
    launcher: LauncherTable = LauncherTable()


class SweepConfig(LauncherConfig):
    """What `ringdraft sweep` is told."""

    sweep: SweepTable
