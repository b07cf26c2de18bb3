"""`ringdraft status` and `ringdraft stop`: what a second terminal does with a live run."""

import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError, RingdraftError
from common.lifecycle import EXIT_CLEAN
from services.launcher.figures import absence, counts, holders, number, share
from services.launcher.progress import describe, fetch_status, rows_trained
from services.launcher.rundir import STOP_NAME, find_run, launcher_pid

_GIBIBYTE = 1 << 30


def stop_run(given: Path | None, timeout_seconds: float) -> int:
    """Ask the launcher to stop and wait until it has ended."""
    directory = find_run(given)
    pid = launcher_pid(directory)
    launcher = os.pidfd_open(pid)
    try:
        # A second signal would mean "at once": whoever stops a stopping run only waits.
        if claim_stop(directory, pid):
            signal.pidfd_send_signal(launcher, signal.SIGTERM)
        print(f"stopping {directory} (launcher pid {pid})", file=sys.stderr)  # noqa: T201
        if not select.select([launcher], [], [], timeout_seconds)[0]:
            raise RingdraftError(
                f"launcher pid {pid} of {str(directory)!r} has not ended after "
                f"{timeout_seconds:g} s; see {directory / 'logs'}, or wait with a longer --timeout"
            )
    finally:
        os.close(launcher)
    return EXIT_CLEAN


def claim_stop(directory: Path, pid: int) -> bool:
    """Say whether this is the first request to stop the launcher `pid`."""
    path = directory / f"{STOP_NAME}.{pid}"
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def show_status(given: Path | None) -> int:
    """Print a live run's status as tables on stdout."""
    directory = find_run(given)
    status = fetch_status(directory)
    if status is None:
        raise ConfigError(
            f"no control plane answers for {str(directory)!r}; is the run alive? "
            f"see {directory / 'logs' / 'control-plane.log'}"
        )
    console = Console(highlight=False, markup=False)
    total = status["target"]["total_rows"] or "?"
    console.print(f"{status['run']['name']}: {status['run']['state']}, "
                  f"{rows_trained(status)}/{total} rows, {describe(status)}")  # fmt: skip
    tables = (_services, _groups, _rings, _gpus, _evaluations)
    for table in (make(status) for make in tables):
        if table.row_count:
            console.print(table)
    for group in status["groups"]:
        if group["last_checkpoint"]:
            console.print(f"last checkpoint of {group['group']}: {group['last_checkpoint']}")
    if (advice := status["bottleneck"]["advice"]) is not None:
        console.print(advice["text"])
    for entry in status["overdue"]:
        console.print(entry["text"])
    for alarm in status["alarms"]:
        console.print(f"alarm at step {alarm['step']} of {alarm['group']}: {alarm['text']}")
    for error in status["errors"]:
        console.print(
            f"error of {error['instance']}, {error['age_seconds']:.0f} s ago: {error['text']}"
        )
    return EXIT_CLEAN


_TEXTS = {"instance", "detail", "group", "ring", "transport", "why", "slots", "deliveries", "UUID",
          "groups without a worker", "name", "has", "arm"}  # fmt: skip
"""Columns that are folded where the terminal is narrow; those of figures keep their width."""


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head not in _TEXTS)
    return table


def _services(status: dict[str, Any]) -> Table:
    table = _table(
        "services", "instance", "phase", "health", "tok/s", "waits", "step", "loss", "detail"
    )
    for view in status["target"]["instances"]:
        report = view["report"] or {}
        table.add_row(view["instance"], view["phase"], view["condition"],
                      number(report.get("tokens_per_second"), 0), share(view["blocked_share"]),
                      "", "", view["detail"])  # fmt: skip
    for view in status["workers"]:
        report = view["report"] or {}
        table.add_row(view["instance"], view["phase"], view["condition"],
                      number(report.get("tokens_per_second"), 0), share(view["starved_share"]),
                      number(report.get("step"), 0), number(report.get("loss"), 4),
                      view["detail"])  # fmt: skip
    for view in status["evaluators"]:
        table.add_row(
            view["instance"], view["phase"], view["condition"], "", "", "", "", view["detail"]
        )
    return table


def _groups(status: dict[str, Any]) -> Table:
    table = _table("groups", "group", "workers", "step", "rows", "skipped", "loss", "prefix",
                   "accepted", "best", "held\nout")  # fmt: skip
    for group in status["groups"]:
        table.add_row(group["group"], str(group["num_live_workers"]), str(group["step"]),
                      str(group["trained_rows"]), number((group["account"] or {}).get("skipped"), 0),
                      number(group["loss"], 4), number(group["accepted_prefix_length"], 3),
                      number(group["acceptance_length"], 3),
                      number(group["best_acceptance_length"], 3),
                      number(group["held_out_acceptance_length"], 3))  # fmt: skip
    return table


def _rings(status: dict[str, Any]) -> Table:
    table = _table("rings", "ring", "transport", "why", "slots", "deliveries", "lease s",
                   "groups without a worker")  # fmt: skip
    for ring in status["rings"]:
        table.add_row(ring["instance"], ring["transport"], ring["transport_reason"],
                      counts(ring["slots"]), counts(ring["deliveries"]),
                      number(ring["oldest_lease_seconds"], 1),
                      ", ".join(map(absence, ring["absent_groups"])))  # fmt: skip
    return table


def _gpus(status: dict[str, Any]) -> Table:
    table = _table("GPUs", "UUID", "name", "has", "free GiB", "of GiB")
    for place in status["gpus"]:
        table.add_row(place["uuid"], place["name"], holders(place),
                      number(place["free_bytes"] / _GIBIBYTE, 1),
                      number(place["total_bytes"] / _GIBIBYTE, 1))  # fmt: skip
    return table


def _evaluations(status: dict[str, Any]) -> Table:
    table = _table(
        "evaluations",
        "group",
        "index",
        "step",
        "arm",
        "temperature",
        "accepted",
        "replay",
        "speed-up",
    )
    for result in status["evaluations"]:
        table.add_row(result["group"], str(result["index"]), str(result["step"]), result["arm"],
                      f"{result['temperature']:g}", number(result["acceptance_length"], 3),
                      number(result["replay_acceptance_length"], 3),
                      number(result["speedup"], 2))  # fmt: skip
    return table
