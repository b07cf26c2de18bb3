"""Whole runs that learn the target's distribution; and those that cannot, refused by name."""

import json
from pathlib import Path

import pytest

from tests.runs import make_run, run_to_end, segments_of, start, train

WORKER = "services.drafter_worker"
LAST = "target.last_hidden_states_normed=true"


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


@pytest.mark.timeout(200)
def test_a_run_with_lk_and_muon_learns_and_goes_on_only_with_muon(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=200)
    given = (LAST, "drafter.loss=lk", "optimizer.kind=muon", "optimizer.schedule=wsd")
    (summary,) = train(config, *given)
    account = summary["groups"]["main"]
    assert account["rows_trained"] == account["rows_published"] > 40
    lines = (tmp_path / "run" / "metrics" / "main-0.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    log = next((tmp_path / "run" / "logs").glob("target*")).read_text()
    assert "check head: argmax equal at" in log
    other = run_to_end(WORKER, "--config", config, *settings(*given, "optimizer.kind=adamw"))
    assert other.returncode == 2, other.stderr
    assert "set the old optimizer.kind" in other.stderr
    assert "Traceback" not in other.stderr
    assert not segments_of(tmp_path)


def test_a_worker_refuses_rows_without_the_target_s_distribution(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=20_000)
    target = start("services.target_server", "--config", config, log=tmp_path / "target.log")
    try:
        done = run_to_end(WORKER, "--config", config, *settings(LAST, "drafter.loss=kl"))
    finally:
        target.terminate()
        target.wait()
    assert done.returncode == 2, done.stderr
    assert "'kl'" in done.stderr
    assert "start the target server with target.last_hidden_states_normed = true" in done.stderr
