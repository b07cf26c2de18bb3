"""An evaluator that runs beside training scores each checkpoint and ends behind the last."""

import json
from pathlib import Path

import pytest

from tests.runs import make_run, run_to_end

UP = "services.launcher.cli"


@pytest.mark.timeout(300)
def test_a_follower_scores_every_checkpoint_and_keeps_the_best(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=200)
    settings = ("--set", "launcher.follow=true", "--set", "training.keep_checkpoints=100")
    done = run_to_end(UP, "up", "--config", config, *settings)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.strip().splitlines()[-1])
    series = tmp_path / "run" / "checkpoints" / "main" / "0"
    steps = {path.name for path in series.glob("step-*")}
    reports = [
        json.loads(path.read_text()) for path in (tmp_path / "run" / "evaluations").iterdir()
    ]
    lengths = {Path(report["checkpoint"]).name: report["acceptance_length"] for report in reports}
    assert set(lengths) == steps
    assert "step-000000" in steps, "the baseline"
    best = (series / "best").resolve().name
    assert lengths[best] == max(lengths.values()) == line["acceptance_length_best"]
    assert line["acceptance_length_before"] == lengths["step-000000"]
    assert line["acceptance_length_after"] == lengths[max(steps)]
