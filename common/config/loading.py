"""TOML files, `--set a.b=c` and `RINGDRAFT_*` variables to one frozen config object.

Order: defaults < files, left to right < environment < `--set`. A key that nobody knows is an
error that names the nearest known one. A service reads the tables it declares and leaves the
tables of the others alone; a table that no service knows is refused. Over a run's tables lie those
that the group in `training.group` has of its own.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from common.config.own_tables import Origins, lay_over
from common.errors import ConfigError

ENVIRONMENT_PREFIX = "RINGDRAFT_"
TABLES = (
    "run", "target", "data", "ring", "groups", "held_out", "drafter", "optimizer", "training",
    "control_plane", "evaluation", "generation", "regeneration", "inspection", "export", "launcher",
    "sweep", "placement",
)  # fmt: skip


class Table(BaseModel):
    """One frozen, strict table of a config file."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


TableT = TypeVar("TableT", bound=Table)


def load(
    model: type[TableT],
    files: list[Path],
    settings: list[str],
    environment: Mapping[str, str] | None = None,
) -> TableT:
    """Return the validated config of a service, or raise `ConfigError` naming key and way out."""
    values: dict[str, Any] = {}
    for path in files:
        _merge(values, _read(path))
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            _assign(values, name[len(ENVIRONMENT_PREFIX) :].lower().split("__"), text, name)
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting!r}: got no '=', expected table.key=value")
        _assign(values, _split(key.strip()), text.strip(), f"--set {key}")
    return _validate(model, values, lay_over(values))


def describe(config: BaseModel) -> str:
    """Return the resolved config as JSON."""
    return json.dumps(config.model_dump(mode="json"), indent=2)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {error}") from error


def _merge(values: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _split(key: str) -> list[str]:
    """Return the parts of a dotted key as TOML reads it: a quoted part may have dots."""
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--set {key!r} is not a key of TOML: {error}") from error
    parts = []
    while isinstance(table, dict):
        ((part, table),) = table.items()
        parts.append(part)
    return parts


def _assign(values: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    if len(keys) < 2:
        raise ConfigError(f"{origin}: got {'.'.join(keys)!r}, expected table.key")
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{origin}: {key!r} is a value, not a table")
    table[keys[-1]] = _parse(text)


def _parse(text: str) -> Any:
    """Read a value as TOML would; what is not TOML is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _validate(model: type[TableT], values: dict[str, Any], origins: Origins) -> TableT:
    for table in values:
        if table not in TABLES:
            raise ConfigError(f"unknown table [{table}]; {_nearest(table, TABLES)}")
    known = {name: value for name, value in values.items() if name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise ConfigError(_explain(model, error, origins)) from error


def _explain(model: type[BaseModel], error: ValidationError, origins: Origins) -> str:
    lines = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        key = origins.name(location)
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}; {_nearest(location[-1], _keys(model, location))}")
        elif problem["type"] == "missing" and len(location) == 1:
            lines.append(f"missing table [{key}]: write it in a config file")
        elif problem["type"] == "missing":
            lines.append(f"missing key {key!r}: set it in a config file or with --set {key}=...")
        elif problem["type"] == "value_error":
            # The validator's own words name what was got and expected.
            lines.append(
                f"{key}: {problem['ctx']['error']}" if key else f"{problem['ctx']['error']}"
            )
        else:
            lines.append(f"{key}: {problem['msg']} (got {problem['input']!r})")
    return "; ".join(lines)


def _keys(model: type[BaseModel], location: list[str]) -> list[str]:
    """Return the keys that a table knows, also where it is one of several under names or numbers."""
    table: Any = model
    for name in location[:-1]:
        if fields := getattr(table, "model_fields", None):
            table = fields[name].annotation if name in fields else None
        else:
            tables = [kind for kind in get_args(table) if hasattr(kind, "model_fields")]
            table = tables[-1] if tables else None
    return list(getattr(table, "model_fields", {}))


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known))}"
