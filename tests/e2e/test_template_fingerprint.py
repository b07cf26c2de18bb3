"""Rows that are rendered or masked in another way than a drafter was trained on are refused."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import Process, make_run, run_to_end, segments_of, start

TARGET = "services.target_server"
WORKER = "services.drafter_worker"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_run(tmp_path, num_conversations=2000)


@pytest.fixture
def target(config: Path, tmp_path: Path) -> Iterator[Process]:
    process = start(TARGET, "--config", config, log=tmp_path / "target.log")
    yield process
    process.terminate()
    process.wait(60)
    assert not segments_of(tmp_path)


def first_checkpoint(config: Path, tmp_path: Path) -> Path:
    """Train until there is a checkpoint, and kill the worker."""
    path = tmp_path / "run" / "checkpoints" / "main" / "0" / "step-000010"
    worker = start(WORKER, "--config", config, log=tmp_path / "worker.log")
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline, (tmp_path / "worker.log").read_text()
        time.sleep(0.02)
    worker.kill()
    worker.wait()
    return path


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("target")
def test_a_worker_with_other_template_arguments_is_refused(config: Path) -> None:
    setting = "target.chat_template_kwargs={enable_thinking=false}"
    done = run_to_end(WORKER, "--config", config, "--set", setting)
    assert done.returncode == 2, done.stderr
    assert "template_fingerprint" in done.stderr
    assert "chat_template_kwargs={'enable_thinking': False}" in done.stderr


@pytest.mark.timeout(200)
def test_a_resume_with_rows_of_another_template_is_refused_on_both_sides(
    config: Path, tmp_path: Path, target: Process
) -> None:
    checkpoint = first_checkpoint(config, tmp_path)
    origin = json.loads((checkpoint / "run.json").read_text())
    template, rule = origin["template_fingerprint"].split("-")
    origin["template_fingerprint"] = f"{template}-{'0' * len(rule)}"
    for path in checkpoint.parent.glob("step-*/run.json"):
        path.write_text(json.dumps(origin))
    worker = run_to_end(WORKER, "--config", config)
    assert worker.returncode == 2, worker.stderr
    assert f"{template}-{rule}" in worker.stderr
    assert "of the checkpoint" in worker.stderr
    target.terminate()
    target.wait(60)
    server = run_to_end(TARGET, "--config", config)
    assert server.returncode == 2, server.stderr
    assert f"expected '{template}-{rule}'" in server.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "setting", ["data.train_only_last_turn=true", "data.one_row_a_turn=true", "data.row_tokens=256"]
)
def test_a_resume_with_another_mask_or_length_is_refused(
    config: Path, tmp_path: Path, target: Process, setting: str
) -> None:
    first_checkpoint(config, tmp_path)
    target.terminate()
    target.wait(60)
    done = run_to_end(TARGET, "--config", config, "--set", setting)
    assert done.returncode == 2, done.stderr
    assert "mask options" in done.stderr
