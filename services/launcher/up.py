"""`ringdraft up`: one run from its config to one JSON line; `sweep` adds to its config and line.

    config --> dry run of every service --> control plane, targets, workers --> evaluator --> line

Nothing starts before every service has accepted the config. People read stderr; stdout gets the
one line.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common.config.loading import load
from common.lifecycle import EXIT_CLEAN, EXIT_CONFIG, EXIT_FAILED, FileLock, write_atomically
from common.placement.sight import require_gpu
from common.run_record import explain, record_start
from services.launcher.config import LauncherConfig, LauncherTable
from services.launcher.dry_run import check
from services.launcher.process import Role, ServiceSpec
from services.launcher.progress import ProgressView, StatusFeed
from services.launcher.rundir import (
    LOCK_NAME,
    RECORD_NAME,
    RUNS,
    STOP_NAME,
    first_and_last_checkpoints,
)
from services.launcher.scale import MOST_WORKERS, REQUEST_NAME, take_request
from services.launcher.summary import remove_old_summaries, summarize
from services.launcher.supervisor import Outcome, Supervisor

# Waiting threads that spin take the cores of the services beside them.
_PASSIVE_THREADS = ("env", "OMP_WAIT_POLICY=PASSIVE", "KMP_BLOCKTIME=0", "GOMP_SPINCOUNT=0")

FOLLOWER = "evaluator"


@dataclass(frozen=True)
class Launch:
    """A run that is ready to start: its config, and the arguments every service gets."""

    config: LauncherConfig
    arguments: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.config.run.directory


def up(
    files: list[Path],
    settings: list[str],
    stop: threading.Event,
    *,
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> int:
    """Run everything that the config names and return the exit code.

    Args:
        complete: makes the line that is printed of the run's summary.
    """
    started_at = time.monotonic()
    launch = prepare(files, settings)
    if launch.config.run.device == "cuda":
        require_gpu()  # each service would say it, when it has loaded what it needs
    resolved = _check(launch)
    directory = launch.directory
    with FileLock(directory / LOCK_NAME, f"launcher of run {launch.config.run.name!r}").acquire(
        remedy="stop it with `ringdraft stop`, or choose another run.directory"
    ):
        _write_records(launch, resolved)
        outcome = _run(launch, stop)
        for name in (RECORD_NAME, f"{STOP_NAME}.{os.getpid()}"):
            (directory / name).unlink(missing_ok=True)
        wall_seconds = time.monotonic() - started_at
        line = complete(summarize(launch.config, outcome, wall_seconds))
        print(json.dumps(line), flush=True)  # noqa: T201
    return _exit_code(outcome)


def show_config(files: list[Path], settings: list[str], stop: threading.Event) -> int:  # noqa: ARG001
    """Print what each service makes of the config, and run nothing."""
    launch = prepare(files, settings)
    print(json.dumps(_check(launch), indent=2))  # noqa: T201
    return EXIT_CLEAN


def prepare(files: list[Path], settings: list[str]) -> Launch:
    """Return the launch: with a run directory where none is set."""
    config = load(LauncherConfig, files, settings)
    chosen = list(settings)
    if "directory" not in config.run.model_fields_set:
        chosen.append(f"run.directory={json.dumps(str(fresh_directory(config.run.name)))}")
    arguments = [part for path in files for part in ("--config", str(path))]
    arguments += [part for setting in chosen for part in ("--set", setting)]
    return Launch(load(LauncherConfig, files, chosen), tuple(arguments))


def fresh_directory(run: str) -> Path:
    """Return a directory name under `runs` that nothing has yet."""
    stem = f"{run}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (stem, *(f"{stem}-{number}" for number in range(2, 100)))
    return next(path for name in names if not (path := RUNS / name).exists())


def service_specs(launch: Launch) -> list[ServiceSpec]:
    """Return the services of a run in the order they start."""
    specs = [_spec(launch, "control-plane", "control_plane")]
    if any(group.is_synced for group in launch.config.groups.values()):
        specs.append(_spec(launch, "quorum-server", "quorum_server"))
    # Each claims a ring when it starts: the names are the logs', in the order of the starts.
    for number in range(launch.config.target.replicas):
        specs.append(_spec(launch, f"target-{number}", "target_server"))
    specs += [spec for group in sorted(launch.config.groups) for spec in _workers(launch, group)]
    if launch.config.launcher.follow:
        specs.append(follower_spec(launch))
    return specs


def worker_specs(launch: Launch, group: str, count: int) -> list[ServiceSpec]:
    """Return so many workers of a group."""
    groups = launch.config.groups
    settings = (f"training.group={json.dumps(group)}",) if list(groups) != ["main"] else ()
    stem = f"worker-{group}" if len(groups) > 1 else "worker"
    return [
        _spec(launch, f"{stem}-{number}", "drafter_worker", settings) for number in range(count)
    ]


def _workers(launch: Launch, group: str) -> list[ServiceSpec]:
    count = launch.config.groups[group].workers or launch.config.launcher.workers
    return worker_specs(launch, group, count)


def follower_spec(launch: Launch) -> ServiceSpec:
    """Return the evaluator that runs beside training."""
    return _spec(launch, FOLLOWER, "evaluator", ("evaluation.follow=true",))


def evaluator_spec(launch: Launch, checkpoints: Sequence[Path]) -> ServiceSpec:
    """Return the evaluator of the given checkpoints."""
    paths = json.dumps([str(path) for path in checkpoints], ensure_ascii=False)
    return _spec(launch, "evaluator", "evaluator", (f"evaluation.checkpoints={paths}",))


def _check(launch: Launch) -> dict[str, Any]:
    specs = service_specs(launch)
    if launch.config.launcher.evaluate and not launch.config.launcher.follow:
        specs.append(evaluator_spec(launch, [launch.directory / "checkpoints"]))
    return {"launcher": launch.config.model_dump(mode="json"), **check(specs)}


def _spec(launch: Launch, name: str, role: Role, settings: Sequence[str] = ()) -> ServiceSpec:
    prefix = _PASSIVE_THREADS if launch.config.launcher.passive_threads else ()
    extra = [part for setting in settings for part in ("--set", setting)]
    module = f"services.{role}"
    return ServiceSpec(
        name, role, (*prefix, sys.executable, "-m", module, *launch.arguments, *extra)
    )


def _run(launch: Launch, stop: threading.Event) -> Outcome:
    table = launch.config.launcher
    with StatusFeed(launch.directory) as feed, ProgressView(feed) as view:
        view.say(f"run {launch.config.run.name!r} in {launch.directory}")
        supervisor = Supervisor(
            launch.config.run.name, launch.directory, table,
            stop=stop, say=view.say, on_tick=view.update,
        )  # fmt: skip

        def scale(group: str, count: int) -> None:
            supervisor.scale(count, worker_specs(launch, group, MOST_WORKERS))

        def tick() -> None:
            take_request(launch.directory, scale)
            for entry in feed.overdue():
                if is_stuck(entry, table):
                    supervisor.end_stuck(entry["pid"], entry["text"])

        with supervisor:
            outcome = supervisor.run(service_specs(launch), on_tick=tick)
            if outcome.kind == "finished":
                # A follower ends behind the last checkpoint.
                launch.config.run.training_ended.touch()
                if table.follow:
                    outcome = supervisor.wait_for(FOLLOWER)
                elif table.evaluate:
                    outcome = _evaluate(launch, supervisor, view)
            if outcome.failed is not None:
                _show_failure(outcome, view)
            elif outcome.kind == "stopped":
                view.say("stopping: workers, then target, then control plane")
            lost = tuple(process.spec.name for process in supervisor.lost)
    return replace(outcome, lost=lost)


def is_stuck(entry: dict[str, Any], table: LauncherTable) -> bool:
    """Say whether an overdue service of /status is to be ended."""
    limit = table.stuck_seconds
    if not entry["has_begun"]:  # imports and compilers keep heartbeats from coming
        limit = max(limit, table.start_seconds)
    return table.stuck_seconds > 0 and entry["age_seconds"] >= limit


def _evaluate(launch: Launch, supervisor: Supervisor, view: ProgressView) -> Outcome:
    pairs = first_and_last_checkpoints(launch.directory)
    checkpoints = list(dict.fromkeys(checkpoint.path for pair in pairs for checkpoint in pair))
    if not checkpoints:
        view.say("no checkpoint to evaluate")
        return Outcome("finished")
    return supervisor.run_once(evaluator_spec(launch, checkpoints))


def _show_failure(outcome: Outcome, view: ProgressView) -> None:
    process = outcome.failed
    assert process is not None
    tail = process.tail()
    view.say(f"{process.spec.name} {process.describe_end()}; the run stops. Its last lines:")
    for line in tail or ["(it wrote nothing)"]:
        view.say(f"    {line}")
    view.say(f"whole log: {process.log_path}")


def _write_records(launch: Launch, resolved: dict[str, Any]) -> None:
    directory = launch.directory
    remove_old_summaries(directory)
    for left in (launch.config.run.training_ended, directory / REQUEST_NAME):
        left.unlink(missing_ok=True)
    write_atomically(directory / "config.json", json.dumps(resolved, indent=2))
    explain(directory, launch.config.run.name)
    record_start(directory, launch.config.run.name)
    record = {
        "pid": os.getpid(),
        "run": launch.config.run.name,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
    }
    write_atomically(directory / RECORD_NAME, json.dumps(record))


def _exit_code(outcome: Outcome) -> int:
    if outcome.failed is None:
        return EXIT_CLEAN
    return EXIT_CONFIG if outcome.failed.exit_code == EXIT_CONFIG else EXIT_FAILED
