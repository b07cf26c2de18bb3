"""A run needs prompts alone: the target writes the answers that the drafter learns from.

One run has an evaluator beside it, which scores each checkpoint and ends behind the last.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_run, run_to_end, segments_of, start, train

UP = "services.launcher.cli"


def make_prompts(folder: Path, count: int) -> tuple[Path, list[str]]:
    """Write a run's config and prompts; return the config and settings of its services."""
    config = make_run(folder, num_conversations=4)
    rows = [{"id": f"p{n}", "prompt": f"the dog {n}"} for n in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config, [
        "data.source=prompts", f"data.path={folder}/prompts.jsonl",
        "generation.max_new_tokens=24", "generation.temperature=1.0", "generation.batch_size=8",
    ]  # fmt: skip


def options(config: Path, settings: list[str]) -> tuple[str | Path, ...]:
    """Return the arguments of a service."""
    return ("--config", config, *(part for setting in settings for part in ("--set", setting)))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run of one command, and its summary."""
    folder = tmp_path_factory.mktemp("prompts")
    config, settings = make_prompts(folder, 60)
    settings += [
        "launcher.follow=true", "training.keep_checkpoints=100", "training.checkpoint_steps=3",
    ]  # fmt: skip
    done = run_to_end(UP, "up", *options(config, settings))
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.timeout(300)
def test_one_command_trains_on_answers_that_nobody_wrote_down(
    ended: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = ended
    assert summary["rows_published"] == summary["rows_trained"] > 10
    assert summary["rows_lost"] == 0
    target = json.loads((folder / "run" / "target-0.summary.json").read_text())
    assert target["captured_tokens"] > 60 * 20
    assert not segments_of(folder)


@pytest.mark.timeout(300)
def test_a_follower_scores_every_checkpoint_and_keeps_the_best(
    ended: tuple[Path, dict[str, Any]],
) -> None:
    run, summary = ended[0] / "run", ended[1]
    series = run / "checkpoints" / "main" / "0"
    steps = {path.name for path in series.glob("step-*")}
    reports = [json.loads(path.read_text()) for path in (run / "evaluations").iterdir()]
    lengths = {Path(report["checkpoint"]).name: report["acceptance_length"] for report in reports}
    assert set(lengths) == steps
    assert len(steps) > 3
    assert "step-000000" in steps, "the baseline"
    best = (series / "best").resolve().name
    assert lengths[best] == max(lengths.values()) == summary["acceptance_length_best"]
    assert summary["acceptance_length_before"] == lengths["step-000000"]
    assert summary["acceptance_length_after"] == lengths[max(steps)]


@pytest.mark.timeout(300)
def test_two_targets_answer_the_prompts_between_them(tmp_path: Path) -> None:
    config, settings = make_prompts(tmp_path, 60)
    accounts = [s["groups"]["main"] for s in train(config, *settings, num_targets=2)]
    published = [account["rows_published"] for account in accounts]
    assert published == [account["rows_trained"] for account in accounts]
    assert sum(published) > 10
    assert {account["rows_lost"] for account in accounts} == {0}
    journals = sorted((tmp_path / "run" / "recipes").glob("target-?.jsonl"))
    assert len(journals) == 2
    lines = [line for journal in journals for line in journal.read_text().splitlines()[1:]]
    assert sorted(i for line in lines for i in json.loads(line)["sample_ids"]) == list(range(60))
    assert not segments_of(tmp_path)


@pytest.mark.timeout(300)
def test_a_killed_target_goes_on_and_no_prompt_is_lost_or_taken_twice(tmp_path: Path) -> None:
    arguments = options(*make_prompts(tmp_path, 200))
    logs = tmp_path / "run" / "logs"
    journal = tmp_path / "run" / "recipes" / "target-0.jsonl"
    first = start("services.target_server", *arguments, log=logs / "target-a.log")
    worker = start("services.drafter_worker", *arguments, log=logs / "worker.log")
    second = None
    try:
        deadline = time.monotonic() + 120
        while not journal.exists() or len(journal.read_text().splitlines()) < 8:
            assert time.monotonic() < deadline, (logs / "target-a.log").read_text()
            assert first.poll() is None, (logs / "target-a.log").read_text()
            time.sleep(0.05)
        first.kill()
        first.wait()
        second = start("services.target_server", *arguments, log=logs / "target-b.log")
        assert second.wait(150) == 0, (logs / "target-b.log").read_text()
        assert worker.wait(60) == 0, (logs / "worker.log").read_text()
    finally:
        for process in (first, worker, second):
            if process is not None:
                process.kill()
                process.wait()
    recipes = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert sorted(i for recipe in recipes for i in recipe["sample_ids"]) == list(range(200))
    assert [recipe["sequence"] for recipe in recipes] == list(range(len(recipes)))
    summary = json.loads((tmp_path / "run" / "workers" / "main-0.summary.json").read_text())
    assert summary["trained_rows"] == len(recipes)
    assert not segments_of(tmp_path)
