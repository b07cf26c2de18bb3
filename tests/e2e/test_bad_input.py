"""Bad input ends with code 2, a message that names the thing and the way out, and no trace."""

import json
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from common.lifecycle import FileLock
from tests.runs import make_run, run_to_end, segments_of, train
from tests.seekers import machine

UP = ("services.launcher.cli", "up")
TARGET = ("services.target_server",)
WORKER = ("services.drafter_worker",)


@pytest.mark.parametrize(
    ("command", "setting", "words"),
    [
        (UP, "data.path={tmp}/nothing.jsonl", ("nothing.jsonl", "data.path")),
        (UP, "drafter.blocksize=4", ("blocksize", "did you mean 'block_size'")),
        (TARGET, "target.model={tmp}/nowhere", ("nowhere", "target.model")),
        (TARGET, "target.target_layer_ids=[1, 9]", ("out of range", "target_layer_ids")),
        (TARGET, "target.target_layer_ids=[1, 5]", ("last layer", "target_layer_ids")),
        (TARGET, "ring.num_slots=4096", ("too small", "ring.num_slots", "shm_size")),
        (WORKER, "training.group=other", ("other", "[groups]")),
        (WORKER, "drafter.loss=kl", ("'kl'", "target.last_hidden_states_normed = true")),
        (
            WORKER,
            "drafter.init_from={tmp}/nowhere",
            ("nowhere", "drafter.init_from", "config.json"),
        ),
        (WORKER, 'training.trackers=["mlflow"]', ("mlflow", "training.trackers")),
        (WORKER, "target.mask_token_id=9999", ("9999", "target.mask_token_id")),
    ],
)
def test_a_setting_that_cannot_be_run_is_named(
    tmp_path: Path, command: tuple[str, ...], setting: str, words: tuple[str, ...]
) -> None:
    config = make_run(tmp_path, num_conversations=4)
    huge = ("--set", "data.row_tokens=1048576") if "num_slots" in setting else ()
    done = run_to_end(*command, "--config", config, "--set", setting.format(tmp=tmp_path), *huge)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not segments_of(tmp_path)


def test_a_run_on_gpus_that_are_not_there_ends_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = make_run(tmp_path, num_conversations=4)
    done = run_to_end(*UP, "--config", config, "--set", "run.device=cuda")
    assert done.returncode == 2, done.stderr
    assert "run.device = 'cuda'" in done.stderr
    assert "run.device = 'cpu'" in done.stderr or "unset it" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_torch_that_knows_no_gpu_is_named_before_anything_starts(tmp_path: Path) -> None:
    if not metadata.version("torch").endswith("+cpu"):
        pytest.skip("this torch is built with CUDA")
    config = make_run(tmp_path, num_conversations=4)
    done = subprocess.run(
        [sys.executable, "-m", *UP, "--config", config, "--set", "run.device=cuda"],
        env=machine(tmp_path, 1), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "is built without CUDA" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_to_end(*UP, "--config", config, "--set", f"control_plane.port={port}")
    assert done.returncode == 2, done.stderr
    assert str(port) in done.stderr
    assert "control_plane.port" in done.stderr


def test_a_run_directory_in_use_is_named_with_its_holder(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=4)
    with FileLock(tmp_path / "run" / "target-0.lock", "another target server").acquire(""):
        done = run_to_end("services.target_server", "--config", config)
    assert done.returncode == 2, done.stderr
    assert "another target server" in done.stderr
    assert "run.directory" in done.stderr


def test_a_sample_longer_than_a_row_is_skipped_and_counted(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=40)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "the lazy dog " * 200},
    ]
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "long", "messages": messages}) + "\n")
        file.write("not json\n")
    (summary,) = train(config)
    assert summary["skipped_samples"] == {"too_long": 1, "not_json": 1}
    assert summary["groups"]["main"]["rows_lost"] == 0
