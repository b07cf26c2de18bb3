"""Files, environment and `--set` to one config; refusals name the key and the way out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from common.config.command_line import parse
from common.config.loading import Table, describe, load
from common.config.shared import ControlPlaneTable, GroupTable, RingTable, RunTable
from common.errors import ConfigError
from services.control_plane.config import ControlPlaneConfig
from services.launcher.config import LauncherConfig, LauncherTable
from services.target_server.config import TargetServerConfig


class TinyRun(Table):
    """A table for these tests."""

    name: str
    num_rows: int = Field(default=4, ge=1)
    rate: float = 0.5
    layers: tuple[int, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"


class TinyConfig(Table):
    """A config for these tests."""

    run: TinyRun


def write(directory: Path, text: str, name: str = "run.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def load_tiny(
    files: list[Path] | None = None,
    settings: list[str] | None = None,
    environment: dict[str, str] | None = None,
) -> TinyRun:
    return load(TinyConfig, files or [], settings or [], environment or {}).run


def refusal(settings: list[str], files: list[Path] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tiny(files, settings)
    return str(caught.value)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "Infinity"])
def test_a_number_that_is_none_is_refused_by_name(text: str) -> None:
    """Timers would overflow on it, and no JSON can hold it."""
    assert "run.rate" in refusal(["run.name=a", f"run.rate={text}"])


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, "[run]\nname = 'a'\nnum_rows = 5\n", "first.toml")
    second = write(tmp_path, "[run]\nnum_rows = 6\n", "second.toml")
    assert load_tiny([first, second]) == TinyRun(name="a", num_rows=6)


def test_set_wins_over_environment_and_environment_over_files(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nname = 'file'\nnum_rows = 5\nrate = 0.1\n")
    environment = {"RINGDRAFT_RUN__NAME": "variable", "RINGDRAFT_RUN__NUM_ROWS": "6"}
    table = load_tiny([file], ["run.name=option"], environment)
    assert (table.name, table.num_rows, table.rate) == ("option", 6, 0.1)


def test_environment_variables_of_others_are_left_alone() -> None:
    environment = {"RINGDRAFT_HOME": "/x", "RUN__NAME": "no", "RINGDRAFT_RUN__NAME": "yes"}
    assert load_tiny(environment=environment).name == "yes"


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("run.num_rows=7", "num_rows", 7),
        ("run.rate=1e-3", "rate", 0.001),
        ("run.layers=[1, 2]", "layers", (1, 2)),
        ("run.name=plain text", "name", "plain text"),
        ('run.name="7"', "name", "7"),
        ("run.name=a=b", "name", "a=b"),
        (" run.device = cuda ", "device", "cuda"),
    ],
)
def test_a_setting_is_read_as_toml_else_as_text(setting: str, key: str, value: object) -> None:
    assert getattr(load_tiny(settings=["run.name=x", setting]), key) == value


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["run.name=a", "run.num_row=3"], ["run.num_row", "did you mean 'num_rows'?"]),
        (["rum.name=a"], ["unknown table [rum]", "did you mean 'run'?"]),
        (["run.num_rows=2"], ["missing key 'run.name'", "--set run.name="]),
        (["run.name=a", "run.num_rows=0"], ["run.num_rows", "greater than or equal to 1", "got 0"]),
        (["run.name=a", "run.device=tpu"], ["run.device", "'cpu' or 'cuda'", "got 'tpu'"]),
        (["run.name"], ["--set 'run.name'", "expected table.key=value"]),
        (["name=a"], ["--set name", "expected table.key"]),
        (["run.name=a", "run.name.first=b"], ["'name' is a value, not a table"]),
    ],
)
def test_a_refusal_names_the_key_and_the_way_out(settings: list[str], parts: list[str]) -> None:
    text = refusal(settings)
    for part in parts:
        assert part in text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "absent.toml" in refusal([], [tmp_path / "absent.toml"])
    assert "is not TOML" in refusal([], [write(tmp_path, "[run")])


def test_tables_of_other_services_are_left_to_them(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nname = 'a'\n[optimizer]\nanything = 1\n")
    assert load_tiny([file]).name == "a"


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        load_tiny(settings=["run.name=a"]).name = "b"


def test_a_run_directory_whose_sockets_would_be_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shorter run\.directory"):
        load(ControlPlaneConfig, [], [f"run.directory=/{'d' * 100}"], {})


def test_the_resolved_config_loads_to_itself() -> None:
    settings = ["run.seed=3", "launcher.workers=2", "target.model=m"]
    config = load(LauncherConfig, [], settings, {})
    assert LauncherConfig.model_validate(json.loads(describe(config))) == config


@pytest.mark.parametrize("value", [float("inf"), 1e308, 1e-9, 0.0, -1.0])
@pytest.mark.parametrize("key", ["heartbeat_seconds", "lease_seconds", "session_timeout_seconds"])
def test_a_ring_takes_no_time_that_a_message_cannot_say(key: str, value: float) -> None:
    """Its owner would end at the first Hello."""
    with pytest.raises(ValueError, match=key):
        RingTable(**{key: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease_seconds": 8.0, "lease_max_seconds": 7.5},
         r"lease_max_seconds got 7\.5, expected at least lease_seconds 8\.0"),
        ({"lease_max_seconds": 5.0}, r"expected at least lease_seconds 10\.0"),
        ({"heartbeat_seconds": 6.0}, "twice heartbeat_seconds"),
        ({"heartbeat_seconds": 1.0, "session_timeout_seconds": 1.9}, "twice heartbeat_seconds"),
        ({"max_attempts": 10**21}, "max_attempts"),
        ({"max_attempts": 0}, "max_attempts"),
    ],
)  # fmt: skip
def test_a_ring_takes_no_times_that_make_poison_of_sound_rows(
    settings: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        RingTable(**settings)
    assert RingTable(lease_seconds=8.0, lease_max_seconds=8.0).max_attempts == 3


@pytest.mark.parametrize(
    "model", [RunTable, RingTable, ControlPlaneTable, GroupTable, LauncherTable]
)
def test_every_key_says_what_it_means(model: type[Table]) -> None:
    silent = [name for name, field in model.model_fields.items() if not field.description]
    assert silent == []


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"groups": {}}, "groups"),
        ({"ring": {"transport": "cuda_ipc"}}, "run.device is 'cpu', expected 'cuda'"),
    ],
)
def test_what_no_run_can_have_is_refused_before_anything_starts(
    tmp_path: Path, tables: dict, named: str
) -> None:
    data = write(tmp_path, "", "data.jsonl")
    known = {"target": {"model": "m"}, "data": {"path": data}}
    TargetServerConfig.model_validate(known)
    with pytest.raises(ValidationError, match=named):
        TargetServerConfig.model_validate(known | tables)


def test_dry_run_prints_the_resolved_config_and_runs_nothing(capsys, tmp_path: Path) -> None:
    arguments = ["--set", f"run.directory={tmp_path}", "--set", "control_plane.port=1", "--dry-run"]
    assert parse(ControlPlaneConfig, "control_plane", arguments) is None
    printed = json.loads(capsys.readouterr().out)
    assert printed["control_plane"]["port"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_service_has_three_options_and_abbreviates_none(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(ControlPlaneConfig, "control_plane", ["--help"])
    assert caught.value.code == 0
    options = {
        word.strip("[],") for word in capsys.readouterr().out.split() if word.startswith("[--")
    }
    assert options == {"--config", "--set", "--dry-run"}
    with pytest.raises(SystemExit):
        parse(ControlPlaneConfig, "control_plane", ["--dry"])


def test_a_service_with_a_bad_config_exits_with_2_and_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.control_plane", "--set", "control_plane.prot=1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "unknown key 'control_plane.prot'; did you mean 'port'?\n"
