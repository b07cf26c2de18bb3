"""`ringdraft sweep`: a grid of drafters on one stream of rows, compared at the end.

    [sweep.grid] --product--> a group each --> `up` --> table on stderr, line on stdout

The target runs each row once for all groups. Nothing but the groups is different from `up`.
"""

import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from common.config.loading import load
from common.config.own_tables import OWN_TABLES
from common.errors import ConfigError
from services.launcher.config import SweepConfig, SweepTable
from services.launcher.up import show_config, up

_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
_FIGURES = {
    "step": ("steps", 0),
    "loss": ("loss", 4),
    "acceptance_length_held_out": ("held out", 3),
    "acceptance_length_after": ("decoded", 3),
    "acceptance_length_best": ("best", 3),
    "speedup_after": ("speed-up", 2),
    "rows_skipped": ("skipped", 0),
}
_FILE_COLUMNS = 200
_DETACH_SECONDS = 300.0
"""For a worker to come at the start; one that was killed holds the others up no longer than this."""
_DECIDING = ("acceptance_length_best", "acceptance_length_after", "acceptance_length_held_out")
"""What the best drafter has most of: the first of these that was measured."""


@dataclass(frozen=True)
class Plan:
    """The groups of a sweep, and what each has otherwise than the run."""

    groups: dict[str, dict[str, Any]]
    """Values by dotted key."""
    common: dict[str, Any]
    """What all groups have."""

    @property
    def settings(self) -> list[str]:
        """The groups as `--set` takes them."""
        return [
            f"groups.{json.dumps(name)}.{key}={json.dumps(value, ensure_ascii=False)}"
            for name, values in self.groups.items()
            for key, value in {**self.common, **values}.items()
        ]


def sweep(
    files: list[Path], settings: list[str], stop: threading.Event, *, is_dry: bool = False
) -> int:
    """Train every drafter of the grid in one run and return the exit code."""
    config = load(SweepConfig, files, settings)
    plan = make_plan(config)
    chosen = [*settings, *plan.settings]
    if "on_worker_failure" not in config.launcher.model_fields_set:
        chosen.append("launcher.on_worker_failure=go_on")  # a rate that is too high is a result
    if is_dry:
        return show_config(files, chosen, stop)
    return up(files, chosen, stop, complete=partial(add_comparison, plan))


def make_plan(config: SweepConfig) -> Plan:
    """Return the groups of a grid, or raise `ConfigError` for one that cannot be."""
    if "groups" in config.model_fields_set:
        raise ConfigError(
            f"groups: got {sorted(config.groups)}, expected none: a sweep makes its own; write what "
            f"they have in common in [sweep.group]"
        )
    axes = read_axes(config.sweep)
    combinations = [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    ]
    common = dict(_flatten(config.sweep.group.model_dump(mode="json", exclude_unset=True)))
    common.setdefault("detach_after_seconds", _DETACH_SECONDS)
    if both := set(axes) & set(common):
        raise ConfigError(
            f"sweep: got {sorted(both)} both in grid and in group; write each in one of them"
        )
    return Plan(dict(zip(_names(combinations), combinations, strict=True)), common)


def read_axes(table: SweepTable) -> dict[str, list[Any]]:
    """Return the values of each dotted key; `"a.b" = [...]` and `a.b = [...]` are alike."""
    pairs = list(_flatten(table.grid))
    axes, num_groups = dict(pairs), 1
    if len(axes) < len(pairs):
        raise ConfigError(f"sweep.grid: got {[key for key, _ in pairs]}, expected each key once")
    for key, values in axes.items():
        _check_axis(key, values)
        num_groups *= len(values)
    if num_groups > table.max_groups:
        sizes = " x ".join(str(len(values)) for values in axes.values())
        raise ConfigError(
            f"sweep.grid: got {sizes} = {num_groups} groups, expected at most sweep.max_groups "
            f"{table.max_groups}; leave out values, or raise it where the machine holds so many"
        )
    return axes


def _check_axis(key: str, values: Any) -> None:
    if key.count(".") != 1 or not key.startswith(tuple(f"{name}." for name in OWN_TABLES)):
        raise ConfigError(
            f"sweep.grid: got {key!r}, expected a key of {', '.join(OWN_TABLES)}, such as "
            f"'drafter.block_size': all else is the same for every group on one stream"
        )
    if not isinstance(values, list) or not values:
        raise ConfigError(f"sweep.grid: {key!r} got {values!r}, expected a list of values")
    if not all(isinstance(value, str | bool | int | float | list) for value in values):
        raise ConfigError(f"sweep.grid: {key!r} got {values!r}, expected texts, numbers or lists")
    if len({json.dumps(value, default=str) for value in values}) < len(values):
        raise ConfigError(f"sweep.grid: {key!r} got {values!r}, expected each value once")


def _flatten(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _names(combinations: list[dict[str, Any]]) -> list[str]:
    """Return names that say the values, or numbers where such would be no names."""
    names = [
        "_".join(f"{_short(key, one)}-{_text(value)}" for key, value in one.items())
        for one in combinations
    ]
    if len(set(names)) == len(names) and all(map(_NAME.fullmatch, names)):
        return names
    return [f"g{number:03d}" for number in range(1, len(combinations) + 1)]


def _short(key: str, keys: Any) -> str:
    """Return a key without its table, where that names it."""
    last = key.rpartition(".")[2]
    is_plain = sum(other.rpartition(".")[2] == last for other in keys) == 1
    return last if is_plain else key.replace(".", "-")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def add_comparison(plan: Plan, line: dict[str, Any]) -> dict[str, Any]:
    """Print the comparison of a run's drafters, and return its line with it."""
    drafters = [
        {
            **drafter,
            "settings": plan.groups.get(drafter["group"], {}),
            "rows_skipped": line["groups"].get(drafter["group"], {}).get("rows_skipped"),
        }
        for drafter in line["drafters"]
    ]
    figure, best = choose_best(drafters)
    line = {**line, "drafters": drafters, "best_drafter": best and {
        **{key: best[key] for key in ("group", "index", "settings")}, "by": figure, figure: best[figure],
    }}  # fmt: skip
    width = None if sys.stderr.isatty() else _FILE_COLUMNS
    console = Console(stderr=True, highlight=False, markup=False, width=width)
    console.print(_table(plan, drafters, best))
    return line


def choose_best(drafters: list[dict[str, Any]]) -> tuple[str, dict[str, Any] | None]:
    """Return the drafter with the most accepted, and by which figure; None where there is none."""
    for figure in _DECIDING:
        measured = [drafter for drafter in drafters if drafter[figure] is not None]
        if measured:
            return figure, max(measured, key=lambda drafter: drafter[figure])
    return "", None


def _table(plan: Plan, drafters: list[dict[str, Any]], best: dict[str, Any] | None) -> Grid:
    axes = list(next(iter(plan.groups.values())))
    table = Grid(title="sweep (* best)", title_justify="left", box=None, pad_edge=False)
    for head in ("", *(_short(key, axes) for key in axes)):
        table.add_column(head, no_wrap=True)
    for head, _ in _FIGURES.values():
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("group/index", overflow="fold")
    for drafter in drafters:
        table.add_row(
            "*" if drafter is best else "",
            *(_text(drafter["settings"].get(key, "")) for key in axes),
            *(_number(drafter[figure], digits) for figure, (_, digits) in _FIGURES.items()),
            f"{drafter['group']}/{drafter['index']}",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
