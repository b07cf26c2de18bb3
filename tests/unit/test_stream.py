"""When a worker has nothing to wait for."""

import json
import threading
from pathlib import Path

import pytest

from common.errors import PeerLostError
from common.lifecycle import FileLock
from common.ring.consumer import RingConsumer
from services.drafter_worker import build
from services.drafter_worker.config import TrainingTable, WorkerConfig
from services.drafter_worker.stream import TARGET_LOCK, TARGET_SUMMARY, stream_is_over


def write_summary(directory: Path, *, is_drained: bool) -> None:
    (directory / TARGET_SUMMARY).write_text(json.dumps({"is_drained": is_drained}))


def test_a_stream_is_over_where_its_target_has_ended_with_every_row_committed(
    tmp_path: Path,
) -> None:
    assert not stream_is_over(tmp_path), "nothing is known"
    write_summary(tmp_path, is_drained=False)
    assert not stream_is_over(tmp_path), "the target was stopped early"
    write_summary(tmp_path, is_drained=True)
    with FileLock(tmp_path / TARGET_LOCK, "a target").acquire(""):
        assert not stream_is_over(tmp_path), "the next target is here"
    assert stream_is_over(tmp_path)


@pytest.fixture
def consumer(tmp_path: Path) -> RingConsumer:
    lonely = RingConsumer(
        endpoint=tmp_path / "target-0.sock", worker_id="w", group="main", capacity=1
    )
    yield lonely
    lonely.close()


def make_config(directory: Path, timeout_seconds: float) -> WorkerConfig:
    config = WorkerConfig.model_validate({"target": {"model": "m"}})
    run = config.run.model_copy(update={"directory": directory})
    training = TrainingTable(target_timeout_seconds=timeout_seconds)
    return config.model_copy(update={"run": run, "training": training})


def test_a_stop_ends_the_wait_for_a_target(tmp_path: Path, consumer: RingConsumer) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    assert build.wait_for_schema(consumer, make_config(tmp_path, 600.0), stop) is None


def test_a_stream_that_is_over_ends_the_wait(
    tmp_path: Path, consumer: RingConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TARGET_START_SECONDS", 0.1)
    write_summary(tmp_path, is_drained=True)
    assert build.wait_for_schema(consumer, make_config(tmp_path, 600.0), threading.Event()) is None


def test_a_target_that_never_answers_is_an_error_with_the_setting(
    tmp_path: Path, consumer: RingConsumer
) -> None:
    with pytest.raises(PeerLostError, match="target_timeout_seconds"):
        build.wait_for_schema(consumer, make_config(tmp_path, 0.3), threading.Event())
