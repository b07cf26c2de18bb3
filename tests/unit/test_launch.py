"""What `ringdraft up` makes of a config before it starts, and of a run that has ended."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.lifecycle import FileLock
from services.launcher.config import LauncherConfig
from services.launcher.progress import describe, rows_trained
from services.launcher.rundir import find_run, first_and_last_checkpoints, launcher_pid
from services.launcher.summary import remove_old_summaries, summarize
from services.launcher.supervisor import Outcome
from services.launcher.up import Launch, evaluator_spec, prepare, service_specs


@pytest.fixture
def in_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Shorter than tmp_path, whose sockets could have paths of more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rd-") as folder, monkeypatch.context() as context:
        context.chdir(folder)
        yield Path(folder)


def launch_of(*settings: str) -> Launch:
    return prepare([], [*settings, "target.model=m"])


def settings_of(arguments: tuple[str, ...]) -> list[str]:
    return [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]


def make_checkpoint(directory: Path, group: str, index: int, step: int, length: float) -> None:
    path = directory / "checkpoints" / group / str(index) / f"step-{step:06d}"
    path.mkdir(parents=True)
    evaluations = directory / "evaluations"
    evaluations.mkdir(exist_ok=True)
    result = {
        "checkpoint": str(path), "step": step, "acceptance_length": length, "is_headline": True
    }  # fmt: skip
    (evaluations / f"{group}-{index}-{step}.json").write_text(json.dumps(result))


def test_a_run_without_a_directory_gets_one_of_its_own(in_directory: Path) -> None:
    first = launch_of("run.name=demo")
    assert first.directory.parent == Path("runs")
    assert first.directory.name.startswith("demo-20")
    first.directory.mkdir(parents=True)
    second = launch_of("run.name=demo")
    assert second.directory != first.directory
    assert f'run.directory="{first.directory}"' in settings_of(first.arguments)


def test_a_directory_that_is_set_is_kept(in_directory: Path) -> None:
    launch = launch_of("run.directory=here")
    assert launch.directory == Path("here")
    assert settings_of(launch.arguments)[0] == "run.directory=here"


def test_every_service_gets_the_same_arguments(in_directory: Path) -> None:
    (in_directory / "run.toml").write_text("[launcher]\nworkers = 2\n")
    launch = prepare([Path("run.toml")], ["run.seed=3", "target.model=m"])
    specs = service_specs(launch)
    assert [spec.name for spec in specs] == ["control-plane", "target-0", "worker-0", "worker-1"]
    for spec in specs:
        assert spec.command == (sys.executable, "-m", f"services.{spec.role}", *launch.arguments)


def test_each_group_gets_its_workers(in_directory: Path) -> None:
    launch = launch_of("groups.fast.policy=skip", "groups.wide.policy=wait", "launcher.workers=2")
    workers = [spec for spec in service_specs(launch) if spec.role == "drafter_worker"]
    assert [spec.name for spec in workers] == [
        "worker-fast-0", "worker-fast-1", "worker-wide-0", "worker-wide-1"
    ]  # fmt: skip
    assert workers[2].command[-1] == 'training.group="wide"'


def test_a_quorum_server_is_started_only_where_a_group_has_sync(in_directory: Path) -> None:
    groups = ("groups.a.sync=none", "groups.b.sync=local_sgd")
    for settings, expected in (((), 0), (groups[:1], 0), (groups, 1)):
        roles = [spec.role for spec in service_specs(launch_of(*settings))]
        assert roles.count("quorum_server") == expected
        assert roles[: 1 + expected] == ["control_plane", "quorum_server"][: 1 + expected]


def test_each_target_of_the_run_is_started_and_claims_its_ring_itself(in_directory: Path) -> None:
    launch = launch_of("target.replicas=3")
    targets = [spec for spec in service_specs(launch) if spec.role == "target_server"]
    assert [spec.name for spec in targets] == ["target-0", "target-1", "target-2"]
    assert len({spec.command for spec in targets}) == 1


def test_passive_threads_are_set_only_where_asked_for(in_directory: Path) -> None:
    launch = launch_of("launcher.passive_threads=true")
    assert service_specs(launch)[1].command[:2] == ("env", "OMP_WAIT_POLICY=PASSIVE")


def test_the_evaluator_gets_its_checkpoints_as_toml(in_directory: Path) -> None:
    spec = evaluator_spec(launch_of(), [Path('a "b"/step-000000'), Path("c")])
    assert spec.command[-1] == r'evaluation.checkpoints=["a \"b\"/step-000000", "c"]'


def test_a_follower_starts_beside_the_workers(in_directory: Path) -> None:
    spec = service_specs(launch_of("launcher.follow=true"))[-1]
    assert (spec.name, spec.role) == ("evaluator", "evaluator")
    assert spec.command[-1] == "evaluation.follow=true"


def test_the_best_checkpoint_is_in_the_line(tmp_path: Path) -> None:
    for step, length in ((0, 1.0), (20, 2.5), (40, 2.25)):
        make_checkpoint(tmp_path, "main", 0, step, length)
    (tmp_path / "checkpoints" / "main" / "0" / "best").symlink_to("step-000020")
    line = summarize(config_of(tmp_path), Outcome("finished"), 1.0)
    assert line["acceptance_length_best"] == 2.5
    assert line["drafters"][0]["best_checkpoint"].endswith("main/0/step-000020")


def test_the_last_checkpoint_is_the_highest_step_that_is_whole(tmp_path: Path) -> None:
    for step in (0, 20, 100):
        make_checkpoint(tmp_path, "main", 0, step, 1.0)
    make_checkpoint(tmp_path, "main", 1, 0, 1.0)
    (tmp_path / "checkpoints" / "main" / "0" / "step-000200.partial").mkdir()
    pairs = first_and_last_checkpoints(tmp_path)
    assert [(first.index, first.step, last.step) for first, last in pairs] == [
        (0, 0, 100),
        (1, 0, 0),
    ]


def config_of(directory: Path, replicas: int = 1) -> LauncherConfig:
    values = {"run": {"directory": directory}, "target": {"model": "m", "replicas": replicas}}
    return LauncherConfig.model_validate(values)


def write_target(directory: Path, index: int, **published: int) -> None:
    groups = {
        group: {
            "rows_published": rows,
            "rows_trained": rows - 1,
            "rows_before": 4,
            "rows_lost": index,
            "rows_open": 1,
            "rows_poison": 2 * index,
            "rows_skipped": 3 * index,
        }
        for group, rows in published.items()
    }
    (directory / f"target-{index}.summary.json").write_text(json.dumps({"groups": groups}))


def test_rows_are_summed_over_targets_and_the_group_that_is_behind_counts(tmp_path: Path) -> None:
    write_target(tmp_path, 0, a=10, b=8)
    write_target(tmp_path, 1, a=7, b=10)
    line = summarize(config_of(tmp_path, replicas=2), Outcome("finished"), 1.0)
    assert (line["rows_published"], line["rows_trained"]) == (17, 15)
    assert (line["rows_lost"], line["rows_open"]) == (1, 2)
    assert (line["rows_poison"], line["rows_skipped"]) == (2, 3)
    assert [line["groups"][name]["rows_published"] for name in "ab"] == [17, 18]


def test_rows_are_null_where_a_target_has_left_no_account(tmp_path: Path) -> None:
    write_target(tmp_path, 0, main=10)
    line = summarize(config_of(tmp_path, replicas=2), Outcome("failed"), 1.0)
    assert line["rows_published"] is line["rows_lost"] is None


def test_the_summary_takes_each_figure_from_who_measured_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "main", 0, 0, 1.02)
    make_checkpoint(tmp_path, "main", 0, 50, 2.5)
    make_checkpoint(tmp_path, "main", 1, 0, 1.01)
    make_checkpoint(tmp_path, "main", 1, 40, 2.25)
    rows = {"rows_published": 64, "rows_trained": 60, "rows_before": 5, "rows_lost": 1, "rows_open": 0,
            "rows_poison": 2, "rows_skipped": 1}  # fmt: skip
    (tmp_path / "target-0.summary.json").write_text(json.dumps({"groups": {"main": rows}}))
    (tmp_path / "workers").mkdir()
    for number, seconds in enumerate((2.0, 4.0)):
        worker = {"trained_tokens": 9999, "tokens_per_second": 1000 / seconds, "step": 1,
                  "group": "main", "index": number, "held_out_acceptance_length": 2 + number,
                  "loss": 1.5 + number}  # fmt: skip
        (tmp_path / "workers" / f"worker-{number}.summary.json").write_text(json.dumps(worker))
    line = summarize(config_of(tmp_path), Outcome("finished"), 12.3456)
    assert line | rows == line
    assert (line["acceptance_length_before"], line["acceptance_length_after"]) == (1.02, 2.5)
    assert line["tokens_per_second"] == 750.0
    assert line["wall_seconds"] == 12.346
    assert [drafter["acceptance_length_after"] for drafter in line["drafters"]] == [2.5, 2.25]
    assert [drafter["acceptance_length_held_out"] for drafter in line["drafters"]] == [2, 3]
    assert [drafter["loss"] for drafter in line["drafters"]] == [1.5, 2.5]
    assert line["acceptance_length_held_out"] == 2


def test_a_figure_that_nobody_measured_is_null(tmp_path: Path) -> None:
    line = summarize(config_of(tmp_path), Outcome("stopped"), 1.0)
    assert (line["outcome"], line["failed_service"], line["drafters"]) == ("stopped", None, [])
    missing = ("acceptance_length_before", "tokens_per_second", "rows_published", "rows_lost")
    assert [line[name] for name in missing] == [None] * 4


def test_the_newer_of_two_evaluations_of_a_checkpoint_counts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "main", 0, 0, 1.0)
    (old,) = (tmp_path / "evaluations").iterdir()
    os.utime(old, ns=(0, 0))
    result = json.loads(old.read_text()) | {"acceptance_length": 1.5}
    (tmp_path / "evaluations" / "a-newer-one.json").write_text(json.dumps(result))
    line = summarize(config_of(tmp_path), Outcome("finished"), 1.0)
    assert line["acceptance_length_before"] == 1.5


def test_summaries_of_an_earlier_launch_are_removed(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    for name in ("target-0.summary.json", "workers/worker-7.summary.json"):
        (tmp_path / name).write_text('{"groups": {"main": {"rows_lost": 99}}}')
    remove_old_summaries(tmp_path)
    line = summarize(config_of(tmp_path), Outcome("finished"), 1.0)
    assert line["rows_lost"] is None


def test_the_one_live_run_is_found_and_two_must_be_named(in_directory: Path) -> None:
    locks = [FileLock(Path("runs") / name / "launcher.lock", name) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="found none"):
        find_run(None)
    with locks[0].acquire(remedy=""):
        assert find_run(None) == Path("runs/a")
        assert launcher_pid(Path("runs/a")) == os.getpid()
        with locks[1].acquire(remedy=""), pytest.raises(ConfigError, match="runs/a, runs/b"):
            find_run(None)
    with pytest.raises(ConfigError, match="not running"):
        launcher_pid(Path("runs/a"))


def test_progress_follows_the_group_that_is_behind() -> None:
    group = {"tokens_per_second": 100.0, "loss": 2.0}
    status = {
        "run": {"state": "running"}, "is_ready": True, "bottleneck": {"name": "target"},
        "target": {"tokens_per_second": 50.0, "total_rows": 9},
        "groups": [
            group | {"trained_rows": 9, "account": {"consumed": 1, "skipped": 3, "poison": 0, "settled_before": 0}},
            group | {"trained_rows": 9, "account": {"consumed": 1, "skipped": 0, "poison": 0, "settled_before": 4}, "loss": 2.5},
            group | {"trained_rows": 3, "account": None, "loss": None},
        ],
    }  # fmt: skip
    assert rows_trained(status) == 3
    assert (
        describe(status)
        == "target 50 tok/s, drafter 300 tok/s, loss 2.000 to 2.500, bottleneck target"
    )


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, services.launcher.cli; "
        "print([name for name in ('torch', 'numpy', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
