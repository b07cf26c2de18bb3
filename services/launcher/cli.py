"""The `ringdraft` command line: each verb runs service modules or talks to a control plane.

Only light modules are imported here, so that `--help` answers at once.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from common.lifecycle import run_service

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train speculative-decoding drafters while the target model runs beside them.",
)

Files = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="FILE", help="TOML file; repeatable, later files win."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="One setting; repeatable."),
]
RunDirectory = Annotated[
    Path | None,
    typer.Option(
        "--run", metavar="DIR", help="The run's directory; default: the one live run under runs/."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and print the config, run nothing.")]


@app.command()
def up(
    config: Files = None,
    settings: Settings = None,
    workers: Annotated[
        int | None, typer.Option(help="Drafter workers of each group; sets launcher.workers.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Run target, workers and control plane until training ends, then evaluate.

    Prints one JSON line on stdout at the end. Ctrl-C stops cleanly, twice at once.
    """
    from services.launcher import up as launcher

    chosen = list(settings or [])
    if workers is not None:
        chosen.append(f"launcher.workers={workers}")
    act = launcher.show_config if dry_run else launcher.up
    _finish(partial(act, config or [], chosen))


@app.command()
def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file with a table sweep.grid; read last.")
    ],
    config: Files = None,
    settings: Settings = None,
    dry_run: DryRun = False,
) -> None:
    """Train a grid of drafters on one stream of rows, as `up` trains one, and compare them.

    Prints a table at the end, and one JSON line on stdout.
    """
    from services.launcher.sweep import sweep as run_sweep

    files = [*(config or []), file]
    _finish(partial(run_sweep, files, settings or [], is_dry=dry_run))


@app.command()
def stop(
    run: RunDirectory = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the end.")] = 180.0,
) -> None:
    """Stop a live run cleanly and wait for its end."""
    from services.launcher.live import stop_run

    _finish(lambda _: stop_run(run, timeout))


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(metavar="N", help="Drafter workers of the group.")],
    group: Annotated[str, typer.Option(help="Where a run has several.")] = "",
    run: RunDirectory = None,
) -> None:
    """Start or stop workers of a live run, until a group has so many."""
    from services.launcher.scale import ask_to_scale

    _finish(lambda _: ask_to_scale(run, group, workers))


@app.command()
def status(run: RunDirectory = None) -> None:
    """Show the figures of a live run."""
    from services.launcher.live import show_status

    _finish(lambda _: show_status(run))


@app.command()
def top(
    run: RunDirectory = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Show the figures of a live run as they change, until q or Ctrl-C."""
    from services.launcher.top import show_frame, watch_run

    _finish(lambda stop: show_frame(run) if once else watch_run(run, stop))


@app.command()
def stacks(
    instance: Annotated[
        str | None,
        typer.Argument(help="As `status` names it; default: all that are stalled or silent."),
    ] = None,
    run: RunDirectory = None,
) -> None:
    """Have services of a live run write what each of their threads is at into their logs."""
    from services.launcher.stacks import ask_for_stacks

    _finish(lambda _: ask_for_stacks(run, instance))


@app.command()
def regenerate(config: Files = None, settings: Settings = None, dry_run: DryRun = False) -> None:
    """Have the target, or a server that serves it, write answers to prompts."""
    _become("services.target_server.regenerate", config, settings, dry_run)


@app.command()
def prepare(config: Files = None, settings: Settings = None, dry_run: DryRun = False) -> None:
    """Report lengths, mask coverage, skipped rows, packing and bytes of the data; train nothing.

    Prints one JSON line on stdout at the end.
    """
    _become("services.target_server.prepare", config, settings, dry_run)


@app.command()
def doctor(config: Files = None, settings: Settings = None, dry_run: DryRun = False) -> None:
    """Check what a run needs of this machine, and name the fix of what is not as it should be.

    Prints one JSON line on stdout at the end; exits 1 where a check fails.
    """
    _become("services.target_server.doctor", config, settings, dry_run)


@app.command()
def estimate(config: Files = None, settings: Settings = None, dry_run: DryRun = False) -> None:
    """Print the bytes of rows and rings, and the /dev/shm that a run needs, before it starts.

    Prints one JSON line on stdout at the end.
    """
    _become("services.target_server.estimate", config, settings, dry_run)


@app.command()
def inspect(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A conversation's id, a line's number, or its name in `prepare`."
        ),
    ],
    config: Files = None,
    settings: Settings = None,
    dry_run: DryRun = False,
) -> None:
    """Print one conversation with its tokens by loss mask, and why it would be skipped."""
    chosen = [*(settings or []), f"inspection.id={json.dumps(name, ensure_ascii=False)}"]
    _become("services.target_server.inspect", config, chosen, dry_run)


@app.command(name="eval")
def evaluate(
    config: Files = None,
    settings: Settings = None,
    draft: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A drafter in the z-lab layout, trained anywhere; repeatable."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure acceptance length and speed-up of checkpoints by decoding."""
    chosen = list(settings or [])
    if draft:
        paths = json.dumps([str(path) for path in draft], ensure_ascii=False)
        chosen.append(f"evaluation.checkpoints={paths}")
    _become("services.evaluator", config, chosen, dry_run)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Option(metavar="DIR", help="The checkpoint to copy.")],
    to: Annotated[str, typer.Option(metavar="LAYOUT", help="zlab or speculators.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A folder that is new, or empty.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
    target: Annotated[
        str, typer.Option(metavar="MODEL", help="Hub id or folder; default: the run's own.")
    ] = "",
) -> None:
    """Copy a checkpoint into a layout that engines load, read back and linted.

    Prints one JSON line on stdout at the end.
    """
    values = {"checkpoint": checkpoint, "to": to, "out": out, "dtype": dtype, "target": target}
    settings = [f"export.{k}={json.dumps(str(v), ensure_ascii=False)}" for k, v in values.items()]
    _become("services.drafter_worker.export", None, settings, dry_run=False)


@app.command()
def lint(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Of any trainer.")],
) -> None:
    """Name each key of a drafter's checkpoint that an engine would misread; exits 1 where one is."""
    from services.launcher.lint import show_findings

    _finish(lambda _: show_findings(checkpoint))


def main() -> None:
    """Run the command line."""
    app()


def _finish(act: Callable[[threading.Event], int]) -> None:
    raise typer.Exit(run_service(act))


def _become(
    module: str, files: list[Path] | None, settings: list[str] | None, dry_run: bool
) -> None:
    """Replace this process by a service module, so that signals and exit codes are its own."""
    arguments = [part for path in files or [] for part in ("--config", str(path))]
    arguments += [part for setting in settings or [] for part in ("--set", setting)]
    arguments += ["--dry-run"] if dry_run else []
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
