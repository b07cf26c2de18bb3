"""What a run shows of itself while it goes on and when it is over."""

import json
import re
from pathlib import Path

import pytest

from common.telemetry.trackers import flatten
from tests.curves import tensorboard_curves
from tests.runs import make_run, run_to_end

UP = ("services.launcher.cli", "up")


def names_in_readme(run: Path) -> list[re.Pattern[str]]:
    """Return a pattern for each file that README.md of a run explains."""
    files = re.findall(r"^\| `([^`]+)` \|", (run / "README.md").read_text(), re.MULTILINE)
    names = [name.rstrip("/") for file in files for name in file.split(", ")]
    return [re.compile(re.sub(r"\\\*|<i>", ".+", re.escape(name))) for name in names]


@pytest.mark.timeout(200)
def test_a_run_explains_itself_and_its_curves_are_alike_everywhere(tmp_path: Path) -> None:
    config, run = make_run(tmp_path, num_conversations=60), tmp_path / "run"
    settings = ("training.trackers=['tensorboard']", "launcher.evaluate=false",
                f"held_out.prompts=['{tmp_path}/held_out.jsonl']", "held_out.max_new_tokens=6")  # fmt: skip
    options = [part for setting in settings for part in ("--set", setting)]
    done = run_to_end(*UP, "--config", config, *options)
    assert done.returncode == 0, done.stderr

    lines = (run / "metrics" / "main-0.jsonl").read_text().splitlines()
    expected: dict[str, dict[int, float]] = {}
    for record in map(json.loads, lines):
        for name, value in flatten(record).items():
            expected.setdefault(name, {})[record["step"]] = pytest.approx(value, rel=1e-6)
    curves = tensorboard_curves(run)
    assert {"loss", "acceptance_rate_at/1", "acceptance_rate_at/3", "gradient_norm", "learning_rate",
            "tokens_per_second", "held_out/all/acceptance_length"} <= curves.keys()  # fmt: skip
    assert curves == expected

    known = names_in_readme(run)
    left = [path.name for path in run.iterdir() if path.name != "README.md"]
    assert not [name for name in left if not any(pattern.fullmatch(name) for pattern in known)]

    again = run_to_end(*UP, "--config", config, *options)
    assert again.returncode == 0, again.stderr
    first, second = json.loads((run / "run.json").read_text())["starts"]
    assert {"python", "ringdraft", "torch", "transformers"} <= first["versions"].keys()
    assert "up" in first["command_line"]
    assert first["started"] <= second["started"]
    assert json.loads((run / "config.json").read_text())["worker-0"]
