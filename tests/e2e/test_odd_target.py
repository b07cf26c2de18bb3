"""A drafter of a whole run, beside a target of odd shape, goes on, is exported and lints clean."""

import json
from pathlib import Path

import pytest

from tests.runs import make_run, run_to_end, train
from tests.targets import make_tiny_target


@pytest.mark.timeout(200)
def test_a_tied_target_with_wide_grouped_heads_is_trained_resumed_and_exported(
    tmp_path: Path,
) -> None:
    config = make_run(tmp_path, num_conversations=100)
    make_tiny_target(tmp_path / "target", hidden_size=64, head_dim=32, tie_word_embeddings=True)
    train(config)
    train(config, "data.data_epochs=2")
    series = tmp_path / "run" / "checkpoints" / "main" / "0"
    newest = max(series.iterdir())
    lines = (tmp_path / "run" / "metrics" / "main-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert sum("is_resumed" in record for record in records) == 1
    steps = [record["step"] for record in records if "is_resumed" not in record]
    assert steps == sorted(set(steps)), "the second run went on from the first"
    for layout in ("zlab", "speculators"):
        out = tmp_path / layout
        table = {"checkpoint": newest, "to": layout, "out": out}
        options = [
            part for key, value in table.items() for part in ("--set", f"export.{key}={value}")
        ]
        done = run_to_end("services.drafter_worker.export", *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["layout"] == layout
        assert run_to_end("services.launcher.cli", "lint", out).returncode == 0
        written = json.loads((out / "config.json").read_text())
        network = written.get("transformer_layer_config", written)
        assert (network["head_dim"], network["tie_word_embeddings"]) == (32, False)
        assert (network["num_attention_heads"], network["num_key_value_heads"]) == (4, 2)
    verifier = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert verifier["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")
