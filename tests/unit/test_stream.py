"""When a worker has nothing to wait for."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.contracts.sequences import ONE_RING, Shard, shards_of
from common.errors import PeerLostError
from common.lifecycle import FileLock
from common.ring.owner import RingOwner
from common.ring.segment import MemorySegment
from common.ring.worker_rings import WorkerRings
from services.drafter_worker import build, stream
from services.drafter_worker.stream import TargetWatch, stream_is_over
from tests.rings import make_groups, make_schema, make_table, publish, wait_until


def write_summary(directory: Path, shard: Shard = ONE_RING, *, is_drained: bool) -> None:
    summary = {"is_drained": is_drained, "shard": shard.model_dump()}
    (directory / f"target-{shard.index}.summary.json").write_text(json.dumps(summary))


def test_a_stream_is_over_where_its_target_has_ended_with_every_row_committed(
    tmp_path: Path,
) -> None:
    assert not stream_is_over(tmp_path, ONE_RING), "nothing is known"
    write_summary(tmp_path, is_drained=False)
    assert not stream_is_over(tmp_path, ONE_RING), "the target was stopped early"
    write_summary(tmp_path, is_drained=True)
    with FileLock(tmp_path / "target-0.lock", "a target").acquire(""):
        assert not stream_is_over(tmp_path, ONE_RING), "the next target is here"
    assert stream_is_over(tmp_path, ONE_RING)


def test_the_end_of_one_target_says_nothing_of_the_others(tmp_path: Path) -> None:
    first, second = shards_of(2)
    write_summary(tmp_path, first, is_drained=True)
    assert stream_is_over(tmp_path, first)
    assert not stream_is_over(tmp_path, second)


def test_the_end_of_a_run_with_another_number_of_targets_says_nothing(tmp_path: Path) -> None:
    write_summary(tmp_path, shards_of(2)[0], is_drained=True)
    assert not stream_is_over(tmp_path, ONE_RING)


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[int], WorkerRings]]:
    opened: list[WorkerRings] = []

    def connect(count: int) -> WorkerRings:
        endpoints = [tmp_path / f"target-{index}.sock" for index in range(count)]
        opened.append(WorkerRings(endpoints, worker_id="w", group="main", capacity=1))
        return opened[-1]

    yield connect
    for rings in opened:
        rings.close()


def open_target(directory: Path, shard: Shard) -> RingOwner:
    return RingOwner(
        endpoint=directory / f"target-{shard.index}.sock", run="stream", schema=make_schema(),
        table=make_table(), groups=make_groups(), shard=shard, backing=MemorySegment,
    )  # fmt: skip


Connect = Callable[[int], WorkerRings]


def test_a_stop_ends_the_wait_for_a_target(tmp_path: Path, connect: Connect) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    rings = connect(2)
    assert build.wait_for_schema(rings, TargetWatch(tmp_path, rings, 600.0), stop) is None


def test_streams_that_are_over_end_the_wait(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "START_SECONDS", 0.1)
    for shard in shards_of(2):
        write_summary(tmp_path, shard, is_drained=True)
    rings = connect(2)
    watch = TargetWatch(tmp_path, rings, 600.0)
    assert build.wait_for_schema(rings, watch, threading.Event()) is None


def test_one_target_of_two_is_enough_to_begin(tmp_path: Path, connect: Connect) -> None:
    rings = connect(2)
    with open_target(tmp_path, shards_of(2)[1]):
        watch = TargetWatch(tmp_path, rings, 600.0)
        assert build.wait_for_schema(rings, watch, threading.Event()) == make_schema()


def test_targets_that_never_answer_are_an_error_with_the_setting(
    tmp_path: Path, connect: Connect
) -> None:
    rings = connect(2)
    with pytest.raises(PeerLostError, match=r"target 0, 1: .*target_timeout_seconds"):
        build.wait_for_schema(rings, TargetWatch(tmp_path, rings, 0.3), threading.Event())


def test_a_dead_target_is_waited_for_while_another_gives_rows_and_no_longer(
    tmp_path: Path, connect: Connect
) -> None:
    rings = connect(2)
    watch = TargetWatch(tmp_path, rings, 0.5)
    with open_target(tmp_path, shards_of(2)[1]) as target:
        publish(target, 1)
        wait_until(lambda: rings.rings[0].silent_seconds > 1.0, "target 0 stays away")
        watch.check()
        lease = rings.acquire(60.0)
        assert lease is not None
        lease.release()
        rings.mark_consumed({1})
        rings.return_buffer(1)
        target.end(1)
        wait_until(lambda: rings.rings[1].is_settled, "nothing more comes of target 1")
        with pytest.raises(PeerLostError, match="target 0: nothing heard"):
            watch.check()


def test_a_worker_goes_on_without_a_target_that_has_ended(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "START_SECONDS", 0.1)
    rings = connect(2)
    write_summary(tmp_path, shards_of(2)[0], is_drained=True)
    watch = TargetWatch(tmp_path, rings, 600.0)
    with open_target(tmp_path, shards_of(2)[1]) as target:
        wait_until(lambda: rings.rings[0].silent_seconds > 0.2, "target 0 stays away")
        watch.check()
        assert rings.unfinished() == [rings.rings[1]]
        assert not rings.is_settled
        target.end(-1)
        wait_until(lambda: rings.is_drained, "target 1 has no row")
        watch.check()


def test_a_target_that_is_waited_for_is_named_with_pid_and_last_row(
    tmp_path: Path,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stream, "SILENCE_SECONDS", 0.3)
    rings = connect(2)
    watch = TargetWatch(tmp_path, rings, 600.0)
    lock = FileLock(tmp_path / "target-1.lock", "a target").acquire("")
    with open_target(tmp_path, shards_of(2)[1]) as target:
        publish(target, 1)
        lease = rings.acquire(60.0)
        assert lease is not None
        lease.release()
        rings.mark_consumed({1})
        rings.return_buffer(1)
        watch.check()
    ring = rings.rings[1]
    wait_until(lambda: ring.silent_seconds > 0.3, "target 1 is silent")
    watch.check()
    watch.check()
    (line,) = [record.getMessage() for record in caplog.records if "waits for" in record.message]
    assert f"waits for target 1 (pid {os.getpid()}, last row trained 1), silent for" in line
    lock.release()
    wait_until(lambda: ring.silent_seconds > 1.0, "its silence has doubled")
    watch.check()
    assert "target 1 (which has ended: no process holds its lock" in caplog.text
    with open_target(tmp_path, shards_of(2)[1]):
        wait_until(lambda: ring.silent_seconds < 0.3, "target 1 is back")
        watch.check()
    assert "target 1 speaks again" in caplog.text
