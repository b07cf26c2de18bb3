"""A run needs prompts alone: the target writes the answers that the drafter learns from."""

import json
import time
from pathlib import Path

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


@pytest.mark.timeout(300)
def test_one_command_trains_on_answers_that_nobody_wrote_down(tmp_path: Path) -> None:
    done = run_to_end(
        UP, "up", *options(*make_prompts(tmp_path, 60)), "--set", "launcher.evaluate=false"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["rows_published"] == summary["rows_trained"] > 10
    assert summary["rows_lost"] == 0
    target = json.loads((tmp_path / "run" / "target-0.summary.json").read_text())
    assert target["captured_tokens"] > 60 * 20
    assert not segments_of(tmp_path)


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
