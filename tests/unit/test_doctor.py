"""The doctor does what a run would do, in small, and names what stands in the way."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from common.config.loading import load
from common.errors import ConfigError
from common.lifecycle import FileLock, claim_lowest
from common.placement.nvml import read_gpus
from common.ring.owner import segment_name
from common.ring.segment import SEGMENT_DIRECTORY, HostSegment
from services.target_server.containers import Facts, judge
from services.target_server.doctor import examine
from services.target_server.finding import DoctorConfig, Finding
from tests.runs import make_run, run_to_end
from tests.seekers import GIB, machine


def found(config: Path, *settings: str) -> dict[str, Finding]:
    return {each.check: each for each in examine(load(DoctorConfig, [config], list(settings)))}


@pytest.fixture(params=["bare", "container"])
def is_contained(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the mark of a container engine is there."""
    mark = tmp_path / "mark"
    if request.param == "container":
        mark.touch()
    monkeypatch.setattr("services.target_server.containers._MARKS", (mark,))
    return mark.exists()


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
    tmp_path: Path, config: Path, is_contained: bool
) -> None:
    run = tmp_path / "run"
    key = "`{}: service:namespaces`" if is_contained else "where the target server runs"
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
        assert key.format("ipc") in finding.fix
        segment = HostSegment.create(segment_name("test-doctor", endpoint, 1), 1, 4096)
        try:
            assert found(config, setting)["namespaces"].state == "ok"
            # Its PID is another process's here: it was written in another namespace.
            holder = json.dumps({"pid": os.getppid(), "holder": "a target server"})
            (run / "target-0.lock").write_text(holder)
            finding = found(config, setting)["namespaces"]
            assert finding.state == "failed"
            assert key.format("pid") in finding.fix
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


def test_every_failed_check_names_a_fix_for_where_one_is(
    tmp_path: Path, config: Path, is_contained: bool
) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        findings = found(
            config, "run.device=cuda", f"control_plane.port={taken.getsockname()[1]}",
            "ring.num_slots=4096", "data.row_tokens=131072", "ring.transport=cuda_ipc",
            f"run.directory={tmp_path}/file/run",
        )  # fmt: skip
    wrong = [each for each in findings.values() if each.state in ("warning", "failed")]
    assert {"ring", "run directory", "port"} <= {each.check for each in wrong}
    assert [each.check for each in wrong if not each.fix] == []
    named = [each.check for each in wrong if "compose" in each.fix]
    assert named if is_contained else not named


def test_a_machine_without_a_driver_says_at_places_what_to_do(
    config: Path, is_contained: bool
) -> None:
    try:
        read_gpus()
    except ConfigError:
        fix = found(config, "run.device=cuda")["places"].fix
        assert "run.device = 'cpu'" in fix
        is_listed = "nvidia-ml-py" in {each.name for each in metadata.distributions()}
        bare = "NVIDIA driver" if is_listed else "pip install 'ringdraft[gpu]'"
        assert ("compose.gpu.yaml" if is_contained else bare) in fix
        assert not is_contained or "pip" not in fix
    else:
        pytest.skip("this machine has a driver")


def test_the_command_prints_one_json_line_and_its_exit_code_says_whether_all_is_well(
    config: Path,
) -> None:
    command = ("services.target_server.doctor", "--config", config)
    done = run_to_end(*command)
    line = json.loads(done.stdout)
    assert (done.returncode, line["failed"]) == (0, []), done.stderr
    assert len(line["findings"]) == 12
    done = run_to_end(*command, "--set", "run.device=cuda")
    assert done.returncode == (1 if json.loads(done.stdout)["failed"] else 0)


CONFINED = Facts(
    user_id=1000, capabilities=0, has_new_privileges=False, is_root_writable=False,
    is_temporary_writable=True, is_temporary_executable=True, locked_bytes=-1, is_first=False,
)  # fmt: skip


def test_a_confined_container_is_well() -> None:
    assert judge(CONFINED, "container", needs_gpu=True).state == "ok"


@pytest.mark.parametrize(
    ("change", "state", "key"),
    [
        ({"user_id": 0}, "warning", "`user:"),
        ({"is_root_writable": True}, "warning", "`read_only: true`"),
        ({"capabilities": 1}, "warning", "`cap_drop: [ALL]`"),
        ({"has_new_privileges": True}, "warning", "no-new-privileges:true"),
        ({"is_temporary_writable": False}, "failed", '`tmpfs: ["/tmp:exec'),
        ({"is_temporary_executable": False}, "failed", '`tmpfs: ["/tmp:exec'),
        ({"locked_bytes": 65536}, "failed", "`ulimits: { memlock: -1 }`"),
    ],
)
def test_what_a_container_lacks_is_named_with_the_key_that_mends_it(
    change: dict, state: str, key: str
) -> None:
    facts = dataclasses.replace(CONFINED, **change)
    finding = judge(facts, "container", needs_gpu=True)
    assert finding.state == state
    assert key in finding.fix
    assert finding.fix.startswith("compose: ")


def test_pinned_memory_is_asked_for_by_gpus_alone() -> None:
    facts = dataclasses.replace(CONFINED, locked_bytes=65536)
    assert judge(facts, "container", needs_gpu=False).state == "ok"


def test_the_control_plane_of_the_run_itself_may_have_the_port(
    tmp_path: Path, config: Path
) -> None:
    run = tmp_path / "run"
    with FileLock(run / "control.lock", "control plane").acquire("stop it"):
        finding = found(config, f"run.directory={run}")["port"]
    assert (finding.state, "is at work" in finding.text) == ("ok", True)


def test_gpus_are_listed_and_places_named_by_kind(tmp_path: Path, config: Path) -> None:
    """In a process of its own, to which NVML is described by a file."""

    def examined(free: int, *settings: str) -> dict[str, dict[str, str]]:
        code = ("import sys, services.target_server.doctor as d; from pathlib import Path; import json;"
                "from common.config.loading import load; from dataclasses import asdict;"
                "c = load(d.DoctorConfig, [Path(sys.argv[1])], sys.argv[2:]);"
                "print(json.dumps([asdict(d.check_driver(c, 'driver')), asdict(d.check_places(c, 'places'))]))")  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code, str(config), "run.device=cuda", *settings],
            capture_output=True, text=True, check=True, env=machine(tmp_path, 2, free=free),
        )  # fmt: skip
        return {each["check"]: each for each in json.loads(done.stdout)}

    well = examined(100 * GIB)
    assert "0: H200 GPU-0000; 1: H200 GPU-0001" in well["driver"]["text"]
    assert "drafter_worker GPU-0000" in well["places"]["text"]
    short = examined(GIB)["places"]
    assert (short["state"], "has 1.0 GiB free" in short["text"]) == ("failed", True)
    kept = examined(100 * GIB, "placement.reserved_for_targets=[0,1]")["places"]
    assert "take it out of placement.reserved_for_targets" in kept["text"]
    assert "placement.check_memory" in short["text"]
    assert "ringdraft estimate" in short["fix"]
