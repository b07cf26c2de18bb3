"""A whole run on rows in float8 trains what the same run on rows in bfloat16 trains."""

import json
from pathlib import Path

import pytest

from tests.runs import make_run, train


def train_on(directory: Path, aux_dtype: str) -> tuple[dict, list[float], str]:
    """Return a run's account, its losses and its target server's log."""
    config = make_run(directory, num_conversations=120)
    (summary,) = train(config, f"ring.aux_dtype={aux_dtype}", "ring.checksum_payload=true")
    run = directory / "run"
    lines = (run / "metrics" / "main-0.jsonl").read_text().splitlines()
    log = (run / "logs" / "target-0.log").read_text()
    return summary["groups"]["main"], [json.loads(line)["loss"] for line in lines], log


@pytest.mark.timeout(300)
def test_a_run_on_rows_in_float8_follows_the_curve_of_bfloat16(tmp_path: Path) -> None:
    summary, narrow, log = train_on(tmp_path / "fp8", "fp8")
    wide_summary, wide, _ = train_on(tmp_path / "bf16", "bf16")
    assert summary["rows_trained"] == summary["rows_published"] == wide_summary["rows_trained"] > 20
    assert summary["rows_lost"] == 0
    assert "check float8: error" in log
    assert narrow != wide, "both runs had the same rows"
    assert narrow == pytest.approx(wide, rel=0.1)
    assert sum(narrow[-3:]) < 0.9 * sum(narrow[:3]), narrow
