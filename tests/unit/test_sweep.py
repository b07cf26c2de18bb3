"""What `ringdraft sweep` makes of a grid before anything starts, and of a run that has ended."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config.loading import load
from common.errors import ConfigError
from services.drafter_worker.config import WorkerConfig
from services.launcher.config import LauncherConfig, SweepConfig, SweepTable
from services.launcher.sweep import Plan, add_comparison, make_plan
from services.launcher.up import prepare, service_specs

BASE = '[target]\nmodel = "m"\n[drafter]\nblock_size = 4\n'
GRID = """
[sweep.grid]
"drafter.block_size" = [8, 16]
optimizer.learning_rate = [1e-3, 0.5, 2e-5]
[sweep.group]
policy = "skip"
workers = 2
drafter.num_layers = 1
"""


def plan_of(tmp_path: Path, text: str, *settings: str) -> Plan:
    file = tmp_path / "grid.toml"
    file.write_text(BASE + text)
    return make_plan(load(SweepConfig, [file], [*settings], {}))


def test_every_combination_is_a_group_named_by_its_values(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, GRID)
    assert list(plan.groups) == [
        f"block_size-{size}_learning_rate-{rate}"
        for size in (8, 16)
        for rate in ("0.001", "0.5", "2e-05")
    ]
    assert plan.groups["block_size-16_learning_rate-0.5"] == {
        "drafter.block_size": 16, "optimizer.learning_rate": 0.5
    }  # fmt: skip


def test_workers_of_each_group_get_its_values_and_what_all_have(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, GRID)
    files = [tmp_path / "grid.toml"]
    for name, values in plan.groups.items():
        worker = load(WorkerConfig, files, [*plan.settings, f'training.group="{name}"'], {})
        assert worker.drafter.block_size == values["drafter.block_size"]
        assert worker.optimizer.learning_rate == values["optimizer.learning_rate"]
        assert worker.drafter.num_layers == 1
        assert worker.groups[name].policy == "skip"
        assert worker.groups[name].detach_after_seconds == 300.0
    specs = service_specs(prepare(files, [f"run.directory={tmp_path}", *plan.settings]))
    assert sum(spec.role == "drafter_worker" for spec in specs) == 6 * 2
    assert sum(spec.role == "target_server" for spec in specs) == 1


def test_a_base_config_may_have_the_grid_in_it_and_is_still_a_run_s(tmp_path: Path) -> None:
    plan_of(tmp_path, GRID)
    assert list(load(LauncherConfig, [tmp_path / "grid.toml"], [], {}).groups) == ["main"]


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ("drafter.loss = ['lk', 'a/b']", ["g001", "g002"]),
        ("drafter.full_attention_layers = [[], [0]]", ["g001", "g002"]),
        ("drafter.loss = ['lk', 'kl']", ["loss-lk", "loss-kl"]),
        ("drafter.x = [1]\noptimizer.x = [true]", ["drafter-x-1_optimizer-x-true"]),
        ("drafter.loss = ['" + "l" * 40 + "']", ["g001"]),
    ],
)
def test_groups_are_numbered_where_values_make_no_name(
    tmp_path: Path, grid: str, names: list[str]
) -> None:
    assert list(plan_of(tmp_path, f"[sweep.grid]\n{grid}").groups) == names


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["missing table [sweep]"]),
        ("[sweep]\ngird = 1", ["unknown key 'sweep.gird'", "did you mean 'grid'?"]),
        ("[sweep.grid]", ["sweep.grid"]),
        ("[sweep.grid]\ndrafter.block_size = []", ["'drafter.block_size' got []", "list of values"]),
        ("[sweep.grid]\ndrafter.block_size = 8", ["'drafter.block_size' got 8", "list of values"]),
        ("[sweep.grid]\ndrafter.block_size = [8, 8]", ["got [8, 8]", "each value once"]),
        ("[sweep.grid]\ndrafter.block_size = [8]\n'drafter.block_size' = [4]", ["each key once"]),
        ("[sweep.grid]\ndrafter.block_size = [1979-05-27]", ["texts, numbers or lists"]),
        ("[sweep.grid]\nblock_size = [8, 16]", ["'block_size'", "drafter, optimizer, training"]),
        ("[sweep.grid]\ndata.row_tokens = [128]", ["'data.row_tokens'", "same for every group"]),
        ("[sweep.grid]\ndrafters.block_size = [8]", ["'drafters.block_size'"]),
        ("[sweep.grid]\ndrafter.num_layers = [1, 2, 3, 4, 5]\ndrafter.block_size = [2, 4, 8, 16]",
         ["5 x 4 = 20 groups", "at most sweep.max_groups 16"]),
        ("[sweep.grid]\ndrafter.block_size = [8]\n[groups.main]", ["got ['main']", "[sweep.group]"]),
        ("[sweep.grid]\ndrafter.block_size = [8]\n[sweep.group.drafter]\nblock_size = 2",
         ["['drafter.block_size']", "both in grid and in group"]),
        ("[sweep.grid]\ndrafter.block_size = [8]\n[sweep.group]\npolcy = 'skip'",
         ["unknown key 'sweep.group.polcy'", "did you mean 'policy'?"]),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, text)
    for part in parts:
        assert part in str(caught.value)


def test_more_groups_are_a_setting(tmp_path: Path) -> None:
    grid = "[sweep.grid]\ndrafter.block_size = [2, 4, 8]"
    assert len(plan_of(tmp_path, grid, "sweep.max_groups=3").groups) == 3
    with pytest.raises(ConfigError, match="= 3 groups"):
        plan_of(tmp_path, grid, "sweep.max_groups=2")


def test_an_unknown_key_of_the_grid_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    data = f'[data]\npath = "{tmp_path}/data.jsonl"\n[launcher]\nevaluate = false\n'
    file, run = tmp_path / "grid.toml", tmp_path / "run"
    file.write_text(f"{BASE}{data}[sweep.grid]\ndrafter.blok_size = [8, 16]\n")
    command = [sys.executable, "-m", "services.launcher.cli", "sweep", str(file)]
    command += ["--set", f"run.directory={run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown key 'groups.blok_size-8.drafter.blok_size'" in done.stderr
    assert "did you mean 'block_size'?" in done.stderr
    assert not run.exists()


def drafter(group: str, index: int = 0, **figures: Any) -> dict[str, Any]:
    known = dict.fromkeys(
        ("loss", "acceptance_length_held_out", "acceptance_length_after", "acceptance_length_best",
         "speedup_after")
    )  # fmt: skip
    return {"group": group, "index": index, "step": 9, **known, **figures}


PLAN = Plan({"a": {"drafter.block_size": 4}, "b": {"drafter.block_size": 8}}, {})


@pytest.mark.parametrize(
    ("a", "b", "figure", "best"),
    [
        ({"best": 1.5, "after": 1.25}, {"best": 1.75, "after": 1.0}, "best", "b"),
        # One that has failed has no figures.
        ({"held_out": 1.5}, {}, "held_out", "a"),
        ({}, {}, None, None),
    ],
)
def test_the_best_drafter_is_told_and_marked(
    capsys: pytest.CaptureFixture[str], a: dict, b: dict, figure: str | None, best: str | None
) -> None:
    a, b = ({f"acceptance_length_{name}": value for name, value in one.items()} for one in (a, b))
    line = {"drafters": [drafter("a", loss=2.5, **a), drafter("b", **b)],
            "groups": {"b": {"rows_skipped": 7}}}  # fmt: skip
    line = add_comparison(PLAN, line)
    assert [one["settings"] for one in line["drafters"]] == list(PLAN.groups.values())
    assert [one["rows_skipped"] for one in line["drafters"]] == [None, 7]
    printed = capsys.readouterr().err.splitlines()
    rows = {row.split()[-1]: row for row in printed[2:] if row.strip()}
    assert [name for name, row in rows.items() if row.startswith("*")] == [f"{best}/0"] * bool(best)
    assert "2.5000" in rows["a/0"]
    if best is None:
        assert line["best_drafter"] is None
    else:
        assert line["best_drafter"]["group"] == best
        assert line["best_drafter"]["by"] == f"acceptance_length_{figure}"


def test_every_key_of_a_sweep_says_what_it_means() -> None:
    assert all(field.description for field in SweepTable.model_fields.values())
