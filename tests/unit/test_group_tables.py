"""A group's own tables lie over the run's, and what is wrong in them is named as it was written."""

import json
from pathlib import Path

import pytest

from common.config.loading import describe, load
from common.config.shared import GroupTable
from common.errors import ConfigError
from services.drafter_worker.config import WorkerConfig
from services.launcher.config import LauncherConfig
from services.target_server.config import TargetServerConfig

GROUPS = """
[target]
model = "m"
[drafter]
block_size = 4
num_layers = 3
[optimizer]
learning_rate = 1e-3
[groups.narrow]
[groups.wide]
policy = "skip"
workers = 2
[groups.wide.drafter]
block_size = 8
[groups.wide.optimizer]
learning_rate = 2e-3
[groups.wide.training]
max_steps = 7
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GROUPS)
    return path


def worker(file: Path, group: str, *settings: str) -> WorkerConfig:
    return load(WorkerConfig, [file], [f"training.group={group}", *settings], {})


def refusal(file: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        worker(file, "wide", *settings)
    return str(caught.value)


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a b", "a/b"])
def test_a_name_that_leaves_its_folder_is_refused(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="groups"):
        load(LauncherConfig, [file], [f"groups.{json.dumps(name)}.workers=1"], {})
    with pytest.raises(ConfigError, match=r"run\.name"):
        load(LauncherConfig, [file], [f"run.name={name}"], {})


def test_each_worker_reads_the_tables_of_its_group_over_those_of_the_run(file: Path) -> None:
    narrow, wide = worker(file, "narrow"), worker(file, "wide")
    assert (narrow.drafter.block_size, wide.drafter.block_size) == (4, 8)
    assert narrow.drafter.num_layers == wide.drafter.num_layers == 3
    assert (narrow.optimizer.learning_rate, wide.optimizer.learning_rate) == (1e-3, 2e-3)
    assert (narrow.training.max_steps, wide.training.max_steps) == (0, 7)
    assert wide.groups["wide"].policy == "skip"
    # A resolved config says the same when it is read again.
    assert WorkerConfig.model_validate(json.loads(describe(wide))) == wide


def test_what_the_command_line_says_of_the_run_stays_below_what_a_group_has(file: Path) -> None:
    settings = ("drafter.block_size=16", "drafter.num_layers=1")
    wide = worker(file, "wide", *settings, "groups.wide.optimizer.learning_rate=0.5")
    assert (wide.drafter.block_size, wide.drafter.num_layers) == (8, 1)
    assert wide.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("groups.wide.drafter.blok_size=8",
         ["unknown key 'groups.wide.drafter.blok_size'", "did you mean 'block_size'?"]),
        ("drafter.blok_size=8", ["unknown key 'drafter.blok_size'"]),
        ("groups.wide.drafter.block_size=1",
         ["groups.wide.drafter.block_size: ", "greater than or equal to 2", "got 1"]),
        ("groups.wide.drafter.full_attention_layers=[1]",
         ["drafter with groups.wide.drafter: full_attention_layers is set"]),
        ("groups.wide.training=7", ["groups.wide.training", "got 7"]),
        ("groups.wide.training.group=narrow", ["groups.wide.training", "'group'"]),
        ("groups.wide.polcy=wait", ["unknown key 'groups.wide.polcy'", "did you mean 'policy'?"]),
        ("groups.wide.target.target_layer_ids=[1]",
         ["groups.wide: got ['target']", "same target_layer_ids", "another run"]),
        ("groups.wide.drafter.loss=kl", ["drafter.loss 'kl'", "last_hidden_states_normed"]),
    ],
)  # fmt: skip
def test_a_wrong_key_of_a_group_is_named_as_it_was_written(
    file: Path, setting: str, parts: list[str]
) -> None:
    text = refusal(file, setting)
    for part in parts:
        assert part in text


def test_another_group_s_tables_are_its_own_workers_business(file: Path) -> None:
    assert worker(file, "narrow", "groups.wide.drafter.blok_size=8").drafter.block_size == 4


def test_services_that_train_nothing_leave_the_tables_alone(file: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.touch()
    setting = "groups.wide.drafter.anything=1"
    for model in (LauncherConfig, TargetServerConfig):
        config = load(model, [file], [setting, f"data.path={data}"], {})
        assert config.groups["wide"].drafter == {"block_size": 8, "anything": 1}


def test_a_name_with_dots_is_quoted_as_in_toml(file: Path) -> None:
    config = worker(file, "lr-0.5", 'groups."lr-0.5".optimizer.learning_rate=0.5')
    assert config.optimizer.learning_rate == 0.5
    assert config.groups["lr-0.5"] == GroupTable(optimizer={"learning_rate": 0.5})
    with pytest.raises(ConfigError, match=r"--set 'groups\.\"a' is not a key of TOML"):
        worker(file, "wide", 'groups."a=1')
