"""The doctor does what a run would do, in small, and names what stands in the way."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.loading import load
from common.lifecycle import claim_lowest
from common.ring.owner import segment_name
from common.ring.segment import SEGMENT_DIRECTORY, HostSegment
from services.target_server.doctor import DoctorConfig, Finding, examine
from tests.runs import make_run


def found(config: Path, *settings: str) -> dict[str, Finding]:
    return {each.check: each for each in examine(load(DoctorConfig, [config], list(settings)))}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_run(tmp_path, 20)


def test_a_machine_that_can_run_has_no_failed_check_and_is_left_as_it_was(
    tmp_path: Path, config: Path
) -> None:
    before = sorted(SEGMENT_DIRECTORY.glob("ringdraft-doctor-*"))
    findings = found(config)
    assert [each for each in findings.values() if each.state == "failed"] == []
    assert findings["ring"].state == "ok"
    assert sorted(SEGMENT_DIRECTORY.glob("ringdraft-doctor-*")) == before
    assert not (tmp_path / "run").exists()


def test_a_ring_that_does_not_fit_is_named_with_the_size_that_it_needs(
    tmp_path: Path, config: Path
) -> None:
    finding = found(config, "ring.num_slots=4096", "data.row_tokens=131072")["ring"]
    assert finding.state == "failed"
    assert "shm_size" in finding.text
    assert "4096 slots" in finding.text


def test_memory_of_a_dead_target_server_is_counted_and_left_alone(
    tmp_path: Path, config: Path
) -> None:
    path = SEGMENT_DIRECTORY / f"ringdraft-test-doctor-{os.getpid()}-{'0' * 8}-{'0' * 16}"
    path.touch(0o600)
    os.truncate(path, 3 << 20)
    try:
        finding = found(config)["/dev/shm"]
        assert path.exists()
    finally:
        path.unlink()
    assert finding.state == "warning"
    assert "segments of dead target servers hold" in finding.text


def test_a_ring_out_of_sight_means_that_namespaces_are_not_shared(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    setting = f"run.directory={run}"
    assert found(config, setting)["namespaces"].state == "skipped"
    claimed = claim_lowest([run / "target-0.lock"], "a target server")
    assert claimed is not None
    with claimed[1]:
        endpoint = run / "target-0.sock"
        endpoint.touch()
        finding = found(config, setting)["namespaces"]
        assert finding.state == "failed"
        assert "`ipc`" in finding.fix
        segment = HostSegment.create(segment_name("test-doctor", endpoint, 1), 1, 4096)
        try:
            assert found(config, setting)["namespaces"].state == "ok"
        finally:
            segment.close()


def test_what_cannot_be_written_or_bound_is_named(tmp_path: Path, config: Path) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        findings = found(config, f"run.directory={tmp_path}/file/run", f"control_plane.port={port}")
    assert findings["run directory"].state == "failed"
    assert "choose another run.directory" in findings["run directory"].fix
    assert findings["port"].state == "warning"
    assert str(port) in findings["port"].text


def test_a_run_on_a_gpu_without_one_fails_with_the_way_out(tmp_path: Path, config: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    findings = found(config, "run.device=cuda")
    assert findings["driver"].state == findings["GPU"].state == "failed"
    assert findings["driver"].fix
    assert findings["GPU"].fix


def test_the_command_prints_one_json_line_and_its_exit_code_says_whether_all_is_well(
    config: Path,
) -> None:
    command = [sys.executable, "-m", "services.target_server.doctor", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    line = json.loads(done.stdout)
    assert (done.returncode, line["failed"]) == (0, []), done.stderr
    assert len(line["findings"]) == 10
    done = subprocess.run(
        [*command, "--set", "run.device=cuda"], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == (1 if json.loads(done.stdout)["failed"] else 0)
