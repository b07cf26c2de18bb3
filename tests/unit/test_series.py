"""`best` follows acceptance and outlives retention; a fall below it is told; a run is followed."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from common.contracts.control_messages import EvaluationResult
from common.contracts.sequences import SequenceSet
from services.drafter_worker.checkpoint import CheckpointStore, TrainerState
from services.evaluator.checkpoints import follow_checkpoints
from services.evaluator.series import SeriesRecord, mark_best
from tests.heartbeats import evaluation

SETTINGS: dict[str, Any] = {"max_new_tokens": 12}


def make_checkpoint(run: Path, step: int, index: int = 0) -> Path:
    path = run / "checkpoints" / "main" / str(index) / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def judge(series: SeriesRecord, path: Path, length: float, **fields: Any) -> EvaluationResult:
    step = int(path.name.removeprefix("step-"))
    return series.judge(
        evaluation(checkpoint=str(path), step=step, acceptance_length=length, **fields)
    )


def best_of(run: Path) -> str:
    return (run / "checkpoints" / "main" / "0" / "best").resolve().name


def test_best_follows_acceptance_and_a_fall_is_told(tmp_path: Path, caplog: Any) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (0, 10, 20, 30, 40)]
    series = SeriesRecord(tmp_path, SETTINGS, alarm_share=0.05)
    results = [
        judge(series, path, length)
        for path, length in zip(paths, (1.0, 2.0, 1.95, 1.8, 2.0), strict=True)
    ]
    assert [result.has_regressed for result in results] == [False, False, False, True, False]
    assert [result.best_acceptance_length for result in results] == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert best_of(tmp_path) == "step-000010", "the first of two equal ones"
    assert "acceptance length 1.800, 10.0 % below the best of its series, 2.000" in caplog.text


def test_a_step_before_the_best_is_no_regression(tmp_path: Path) -> None:
    late, early = make_checkpoint(tmp_path, 50), make_checkpoint(tmp_path, 0)
    series = SeriesRecord(tmp_path, SETTINGS, alarm_share=0.05)
    judge(series, late, 2.0)
    assert not judge(series, early, 1.0).has_regressed
    assert best_of(tmp_path) == "step-000050"


def test_only_the_headline_of_a_series_of_the_run_counts(tmp_path: Path) -> None:
    path, other = make_checkpoint(tmp_path, 10), make_checkpoint(tmp_path, 20, index=1)
    series = SeriesRecord(tmp_path, SETTINGS, alarm_share=0.05)
    judge(series, path, 1.5)
    judge(series, path, 9.0, is_headline=False, temperature=1.0)
    assert not judge(series, other, 1.1).has_regressed, "another drafter"
    result = judge(series, make_checkpoint(tmp_path, 30), 1.45)
    assert (result.best_acceptance_length, result.has_regressed) == (1.5, False)


def test_earlier_figures_count_where_they_were_measured_alike(tmp_path: Path) -> None:
    old, new = make_checkpoint(tmp_path, 10), make_checkpoint(tmp_path, 20)
    body = evaluation(checkpoint=str(old), step=10, acceptance_length=3.0).model_dump(mode="json")
    evaluations = tmp_path / "evaluations"
    evaluations.mkdir()
    (evaluations / "a.json").write_text(json.dumps(body | {"settings": SETTINGS}))
    (evaluations / "b.json").write_text("no report")
    series = SeriesRecord(tmp_path, SETTINGS, alarm_share=0.05)
    assert series.has(old)
    assert not series.has(new)
    assert judge(series, new, 2.0).has_regressed
    other = SeriesRecord(tmp_path, {"max_new_tokens": 13}, alarm_share=0.05)
    assert not other.has(old)
    assert not judge(other, new, 2.0).has_regressed


def write_step(store: CheckpointStore, step: int) -> Path:
    state = TrainerState(step=step, trained_rows=0, trained_tokens=0, consumed=SequenceSet())
    return store.save(lambda path: (path / "config.json").write_text("{}"), {}, state, {})


def test_best_outlives_retention_until_another_is_better(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints" / "main" / "0"
    store = CheckpointStore(directory, keep=2)
    paths = [write_step(store, step) for step in (0, 10)]
    mark_best(paths[1])
    for step in (20, 30, 40):
        write_step(store, step)

    def steps() -> list[str]:
        return sorted(path.name for path in directory.glob("step-*"))

    assert steps() == ["step-000000", "step-000010", "step-000030", "step-000040"]
    mark_best(directory / "step-000040")
    write_step(store, 50)
    assert steps() == ["step-000000", "step-000040", "step-000050"]
    assert CheckpointStore(directory, keep=2).newest() == directory / "step-000050"


def test_a_checkpoint_that_is_gone_is_not_made_the_best(tmp_path: Path) -> None:
    gone, path = make_checkpoint(tmp_path, 10), make_checkpoint(tmp_path, 20)
    shutil.rmtree(gone)
    series = SeriesRecord(tmp_path, SETTINGS, alarm_share=0.05)
    judge(series, gone, 2.0)
    assert judge(series, path, 1.5).has_regressed
    assert best_of(tmp_path) == "step-000020"


def test_the_best_stays_where_it_was_not_measured_alike(tmp_path: Path) -> None:
    old, new = make_checkpoint(tmp_path, 10), make_checkpoint(tmp_path, 20)
    mark_best(old)
    series = SeriesRecord(tmp_path, SETTINGS, alarm_share=0.05)
    judge(series, new, 9.0)
    assert best_of(tmp_path) == "step-000010"
    judge(series, old, 1.0)
    assert best_of(tmp_path) == "step-000020", "both were measured in one way"


def test_an_evaluation_elsewhere_leaves_a_runs_best_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "theirs", 10)
    result = judge(SeriesRecord(tmp_path / "mine", SETTINGS, alarm_share=0.05), path, 3.0)
    assert result.best_acceptance_length == 0
    assert not (path.parent / "best").exists()


@pytest.mark.parametrize("ends_by", ["training", "stop"])
def test_a_followed_run_gives_each_checkpoint_once(tmp_path: Path, ends_by: str) -> None:
    ended, stop, seen = threading.Event(), threading.Event(), []
    make_checkpoint(tmp_path, 0)
    follower = follow_checkpoints(tmp_path, stop, threading.Event(), ended.is_set)
    seen.append(next(follower).name)
    make_checkpoint(tmp_path, 20)
    make_checkpoint(tmp_path, 10)
    seen.append(next(follower).name)
    seen.append(next(follower).name)
    make_checkpoint(tmp_path, 30)
    if ends_by == "training":
        ended.set()
        seen += [path.name for path in follower]
        assert seen == [f"step-{step:06d}" for step in (0, 10, 20, 30)]
    else:
        stop.set()
        assert list(follower) == []


def test_a_follower_that_is_asked_takes_the_newest_of_each_series_and_then_the_rest(
    tmp_path: Path,
) -> None:
    ended, asked = threading.Event(), threading.Event()
    for step in (0, 10, 20):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 15, index=1)
    follower = follow_checkpoints(tmp_path, threading.Event(), asked, ended.is_set)
    assert next(follower).name == "step-000000"
    asked.set()
    ended.set()
    order = [(path.parent.name, path.name) for path in follower]
    assert order == [("0", "step-000020"), ("1", "step-000015"), ("0", "step-000010")]
    assert not asked.is_set()
