"""What one run leaves behind: its curves, its held-out figures, its files; and what is left to do."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.telemetry.trackers import flatten
from tests.curves import tensorboard_curves
from tests.runs import make_run, run_to_end, segments_of

pytestmark = pytest.mark.timeout(200)


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and how it is started."""

    directory: Path
    command: tuple[str | Path, ...]
    summary: dict[str, Any]

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def records(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics" / "main-0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def measures(self) -> dict[int, list[dict[str, Any]]]:
        """Return the held-out figures by step."""
        return {
            record["step"]: record["held_out"] for record in self.records() if "held_out" in record
        }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("finished")
    config = make_run(directory, num_conversations=60)
    prompts = directory / "questions.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"the dog {i}"}]} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, asked)))
    settings = (
        "training.trackers=['tensorboard']", "launcher.evaluate=false",
        f"held_out.prompts=['{prompts}']", "held_out.max_new_tokens=12", "held_out.steps=8",
    )  # fmt: skip
    options = [part for setting in settings for part in ("--set", setting)]
    command = ("services.launcher.cli", "up", "--config", config, *options)
    done = run_to_end(*command)
    assert done.returncode == 0, done.stderr
    return Finished(directory, command, json.loads(done.stdout.splitlines()[-1]))


def names_in_readme(run: Path) -> list[re.Pattern[str]]:
    """Return a pattern for each file that README.md of a run explains."""
    files = re.findall(r"^\| `([^`]+)` \|", (run / "README.md").read_text(), re.MULTILINE)
    names = [name.rstrip("/") for file in files for name in file.split(", ")]
    return [re.compile(re.sub(r"\\\*|<i>", ".+", re.escape(name))) for name in names]


def test_its_curves_are_alike_everywhere(finished: Finished) -> None:
    expected: dict[str, dict[int, float]] = {}
    for record in finished.records():
        for name, value in flatten(record).items():
            expected.setdefault(name, {})[record["step"]] = pytest.approx(value, rel=1e-6)
    curves = tensorboard_curves(finished.run)
    assert {"loss", "acceptance_rate_at/1", "acceptance_rate_at/3", "gradient_norm", "learning_rate",
            "tokens_per_second", "held_out/all/acceptance_length"} <= curves.keys()  # fmt: skip
    assert curves == expected


def test_its_readme_explains_each_of_its_files(finished: Finished) -> None:
    known = names_in_readme(finished.run)
    left = [path.name for path in finished.run.iterdir() if path.name != "README.md"]
    assert not [name for name in left if not any(pattern.fullmatch(name) for pattern in known)]


def test_the_worker_measures_at_step_0_in_between_and_at_the_end(finished: Finished) -> None:
    summary = json.loads((finished.run / "workers" / "main-0.summary.json").read_text())
    found, last = finished.measures(), summary["step"]
    assert last > 16
    assert sorted(found) == sorted({*range(0, last, 8), last})
    for figures in found.values():
        assert figures[0]["num_answers"] == 3
        assert [(f["tag"], f["context"]) for f in figures] == [("", ""), ("questions", "under 256")]
        assert figures[0]["acceptance_length"] >= 1.0


def test_started_again_it_has_nothing_to_do_and_ends_cleanly(finished: Finished) -> None:
    run = finished.run
    assert finished.summary["groups"]["main"]["rows_trained"] > 0
    measured, answers = sorted(finished.measures()), run / "held_out.safetensors"
    written = answers.stat().st_mtime_ns
    again = run_to_end(*finished.command)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout.splitlines()[-1])
    assert summary["rows_published"] == summary["rows_lost"] == 0
    assert sorted(finished.measures()) == measured
    assert answers.stat().st_mtime_ns == written
    first, second = json.loads((run / "run.json").read_text())["starts"]
    assert {"python", "ringdraft", "torch", "transformers"} <= first["versions"].keys()
    assert "up" in first["command_line"]
    assert first["started"] <= second["started"]
    assert json.loads((run / "config.json").read_text())["worker-0"]
    assert not segments_of(finished.directory)
