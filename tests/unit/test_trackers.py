"""Curves elsewhere are those of the JSON lines; what a tracker lacks is said before a run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.loading import load
from common.errors import ConfigError
from common.telemetry.metrics import MetricsLog
from common.telemetry.trackers import check_installed, flatten, open_trackers
from services.drafter_worker.config import WorkerConfig
from tests.curves import tensorboard_curves


def open_log(run: Path) -> MetricsLog:
    trackers = open_trackers(["tensorboard"], run, "main-0", {})
    return MetricsLog(run / "metrics" / "main-0.jsonl", trackers)


def test_a_record_is_told_by_names_of_its_numbers() -> None:
    held_out = [
        {"tag": "", "context": "", "acceptance_length": 1.5, "acceptance_rate_at": (0.5,)},
        {"tag": "code", "context": "under 512", "acceptance_length": 2, "acceptance_rate_at": ()},
    ]
    record = {"time": 1.0, "step": 4, "loss": 2.5, "rate_at": (0.5, 0.25), "is_resumed": True,
              "tokens_per_second": None, "held_out": held_out}  # fmt: skip
    assert flatten(record) == {
        "loss": 2.5,
        "rate_at/1": 0.5,
        "rate_at/2": 0.25,
        "held_out/all/acceptance_length": 1.5,
        "held_out/all/acceptance_rate_at/1": 0.5,
        "held_out/code/under 512/acceptance_length": 2.0,
    }


def test_tensorboard_hides_the_steps_of_weights_that_were_lost(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in (2, 4, 6, 8):
            log.write(step, loss=float(step))
    with open_log(tmp_path) as log:
        log.write(4, is_resumed=True)
        log.write(6, loss=60.0)
    assert tensorboard_curves(tmp_path) == {"loss": {2: 2.0, 4: 4.0, 6: 60.0}}


def test_lines_outlive_a_tracker_that_cannot_write(tmp_path: Path, caplog: Any) -> None:
    with open_log(tmp_path) as log:
        writer = log._trackers[0]._writer
        writer._async_writer._worker.exception = OSError(28, "No space left on device")
        log.write(1, loss=1.0)
        log.write(2, loss=2.0)
        writer._async_writer._worker.exception = None
    assert caplog.text.count("events cannot be written and end here") == 1
    lines = (tmp_path / "metrics" / "main-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.0, 2.0]


def test_lines_outlive_a_tracker_that_cannot_begin(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    with open_log(tmp_path) as log:
        log.write(1, loss=1.0)
    assert caplog.text.count("events cannot be written and end here") == 1
    assert len((tmp_path / "metrics" / "main-0.jsonl").read_text().splitlines()) == 1


def test_a_torn_line_is_cut_off_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "main-0.jsonl"
    with MetricsLog(path) as log:
        log.write(1, loss=1.0)
    with path.open("a") as file:
        file.write('{"time": 1.0, "ste')
    with MetricsLog(path) as log:
        log.write(2, loss=2.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(ValueError, match="install ringdraft with its extra `nothing`, or drop it"):
        check_installed(["nothing"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"training\.trackers"):
        load(WorkerConfig, [], ["target.model=m", 'training.trackers=["mlflow"]'], {})
