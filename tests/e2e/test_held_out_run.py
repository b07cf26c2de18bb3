"""A whole run that measures acceptance on held-out answers, from step 0 to its end; and once more."""

import json
from pathlib import Path

import pytest

from tests.runs import make_run, train


def measures(run: Path) -> dict[int, list[dict]]:
    lines = map(json.loads, (run / "metrics" / "main-0.jsonl").read_text().splitlines())
    return {line["step"]: line["held_out"] for line in lines if "held_out" in line}


@pytest.mark.timeout(200)
def test_worker_measures_at_step_0_in_between_and_at_the_end(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=160)
    prompts = tmp_path / "questions.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"the dog {i}"}]} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, asked)))
    settings = (f'held_out.prompts=["{prompts}"]', "held_out.max_new_tokens=12", "held_out.steps=8")
    train(config, *settings)
    run = tmp_path / "run"
    last = json.loads((run / "workers" / "main-0.summary.json").read_text())["step"]
    found = measures(run)
    assert last > 16
    assert sorted(found) == sorted({*range(0, last, 8), last})
    for figures in found.values():
        assert figures[0]["num_answers"] == 3
        assert [(f["tag"], f["context"]) for f in figures] == [("", ""), ("questions", "under 256")]
        assert figures[0]["acceptance_length"] >= 1.0
    written = (run / "held_out.safetensors").stat().st_mtime_ns
    train(config, *settings)
    assert sorted(measures(run)) == sorted(found)
    assert (run / "held_out.safetensors").stat().st_mtime_ns == written
