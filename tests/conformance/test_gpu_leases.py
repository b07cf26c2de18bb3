"""Leases between real processes and a real control plane, on machines whose NVML is described by a file."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.contracts.placement_messages import GpuClaim, GpuGrant
from common.lifecycle import lock_holder
from tests.control_planes import Line, Served
from tests.heartbeats import RUN, beat
from tests.runs import make_run
from tests.seekers import GIB, WATCHDOG_SECONDS, Seeker, describe, gpu, machine

Open = Callable[..., Seeker]
QUICK = "control_plane.heartbeat_seconds=0.2"
AT_ONCE = "placement.wait_seconds=0"
# Longer than a control plane hears who has what before it grants.
SOON = "placement.wait_seconds=2"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def seek(tmp_path: Path) -> Iterator[Open]:
    seekers: list[Seeker] = []

    def open_one(environment: dict[str, str], name: str, *settings: str, **options: Any) -> Seeker:
        seekers.append(Seeker(tmp_path / "run", environment, name, *settings, **options))
        return seekers[-1]

    yield open_one
    for seeker in seekers:
        seeker.end(signal.SIGKILL)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def open_one(*settings: str) -> Served:
        served.append(Served(tmp_path / "run", QUICK, *settings))
        return served[-1]

    yield open_one
    for each in served:
        each.close(signal.SIGKILL)


def holders(status: dict) -> dict[str, list[str]]:
    return {gpu["uuid"]: [h["instance"] for h in gpu["holders"]] for gpu in status["gpus"]}


def places(run: Path) -> Counter[str]:
    """Count the locks that live processes hold, by GPU."""
    paths = [path for path in (run / "gpus").iterdir() if path.name.startswith(("GPU-", "MIG-"))]
    return Counter(path.name.split(".")[0] for path in paths if lock_holder(path) is not None)


def test_a_worker_gets_a_gpu_that_cuda_shows_alone_and_status_names_it(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    control = serve()
    first = seek(machine(tmp_path, 2), "main-0").answer()
    assert first == {
        "uuid": "GPU-0000", "shown": "GPU-0000", "reason": "granted by the control plane"
    }  # fmt: skip
    second = seek(machine(tmp_path, 2), "target-0", service="target_server").answer()
    assert second["uuid"] == "GPU-0001"
    status = control.until(
        lambda s: holders(s) == {"GPU-0000": ["main-0"], "GPU-0001": ["target-0"]}
    )
    shown = status["gpus"][0]
    assert (shown["name"], shown["total_bytes"], shown["is_reserved"]) == ("H200", 140 * GIB, False)
    assert shown["free_bytes"] == 130 * GIB  # what the driver says, less what the worker is to take
    metrics = control.http.get("/metrics").text
    assert 'control_plane_gpu_leases{gpu="GPU-0000",service="drafter_worker"} 1.0' in metrics


def test_a_refusal_names_each_gpu_and_what_to_change(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    limit = ("placement.workers_per_gpu=1", "placement.reserved_for_targets=[0]")
    serve(*limit)
    environment = machine(tmp_path, 2)
    assert seek(environment, "main-0", *limit).answer()["uuid"] == "GPU-0001"
    refused = seek(environment, "main-1", *limit, "placement.wait_seconds=1").answer()
    assert refused["kind"] == "PlacementError"
    assert "GPU-0000 (0, H200) is kept for targets" in refused["error"]
    assert "GPU-0001 (1, H200) has 1 of 1 workers (main-0)" in refused["error"]
    assert "raise placement.workers_per_gpu" in refused["error"]
    assert seek(environment, "t", *limit, service="target_server").answer()["uuid"] == "GPU-0000"
    hidden = seek(environment | {"CUDA_VISIBLE_DEVICES": ""}, "main-2", *limit).answer()
    assert hidden["kind"] == "ConfigError"
    assert "CUDA_VISIBLE_DEVICES is ''" in hidden["error"]
    only = seek(environment | {"CUDA_VISIBLE_DEVICES": "0"}, "main-3", *limit, AT_ONCE).answer()
    assert "GPU-0001" not in only["error"]


def test_mig_devices_are_places_of_their_own(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    serve("placement.workers_per_gpu=1")
    parts = {
        str(n): {"uuid": f"MIG-{n}", "name": "1g", "total": 16 * GIB, "free": 16 * GIB}
        for n in (0, 2)
    }
    whole = {"uuid": "GPU-0000", "name": "H200", "total": 140 * GIB, "free": 99 * GIB, "mig": parts}
    environment = describe(tmp_path, [whole])
    found = [seek(environment, f"main-{n}", "placement.workers_per_gpu=1") for n in range(2)]
    assert {seeker.answer()["shown"] for seeker in found} == {"MIG-0", "MIG-2"}


def test_sixty_four_workers_at_once_fill_sixteen_places_and_no_more(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    limit = ("placement.workers_per_gpu=2",)
    control = serve(*limit)
    environment = machine(tmp_path, 8)
    seekers = [seek(environment, f"main-{n}", *limit, SOON) for n in range(64)]
    answers = [seeker.answer() for seeker in seekers]
    granted = Counter(answer["uuid"] for answer in answers if "uuid" in answer)
    assert granted == {f"GPU-{n:04x}": 2 for n in range(8)}
    assert places(tmp_path / "run") == granted
    refused = [answer["error"] for answer in answers if "error" in answer]
    assert len(refused) == 48
    assert all("has 2 of 2 workers" in text for text in refused)
    found = holders(control.until(lambda s: sum(map(len, holders(s).values())) == 16))
    assert all(len(names) == 2 for names in found.values())


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_the_place_of_one_that_ends_or_is_killed_is_free_again(
    tmp_path: Path, seek: Open, serve: Callable[..., Served], signal_number: int
) -> None:
    limit = ("placement.workers_per_gpu=1",)
    serve(*limit)
    environment = machine(tmp_path, 1)
    first = seek(environment, "main-0", *limit)
    assert first.answer()["uuid"] == "GPU-0000"
    waiting = seek(environment, "main-1", *limit)  # it asks until there is a place
    first.end(signal_number)
    assert waiting.answer()["uuid"] == "GPU-0000"
    assert places(tmp_path / "run") == {"GPU-0000": 1}


def test_without_a_control_plane_workers_find_their_places_by_the_locks(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    limit = ("placement.workers_per_gpu=2",)
    environment = machine(tmp_path, 3)
    seekers = [seek(environment, f"main-{n}", *limit, AT_ONCE) for n in range(7)]
    answers = [seeker.answer() for seeker in seekers]
    granted = Counter(answer["uuid"] for answer in answers if "uuid" in answer)
    assert granted == {f"GPU-{n:04x}": 2 for n in range(3)}
    assert {a["reason"] for a in answers if "uuid" in a} == {
        "chosen by itself, since no control plane answered in 5 s"
    }
    (refused,) = [answer["error"] for answer in answers if "error" in answer]
    assert "has 2 of 2 workers" in refused
    # One that starts then knows the leases of all, and grants none of these places again.
    control = serve(*limit)
    late = seek(environment, "main-7", *limit, SOON)
    assert "has 2 of 2 workers" in late.answer()["error"]
    found = holders(control.until(lambda s: sum(map(len, holders(s).values())) == 6))
    assert all(len(names) == 2 for names in found.values())


def test_a_control_plane_that_restarts_amid_a_rush_grants_nothing_twice(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    limit = ("placement.workers_per_gpu=2", "placement.wait_seconds=4")
    control = serve(*limit)
    environment = machine(tmp_path, 4)
    seekers = [seek(environment, f"main-{n}", *limit) for n in range(6)]
    assert "uuid" in seekers[0].answer()
    control.close(signal.SIGKILL)
    seekers += [seek(environment, f"main-{n}", *limit) for n in range(6, 12)]
    control = serve(*limit)
    answers = [seeker.answer() for seeker in seekers[1:]]
    assert sum("uuid" in answer for answer in answers) == 7
    assert places(tmp_path / "run") == {f"GPU-{n:04x}": 2 for n in range(4)}
    found = holders(control.until(lambda s: sum(map(len, holders(s).values())) == 8))
    assert all(len(names) == 2 for names in found.values())


def test_one_that_is_silent_and_lives_keeps_its_place(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    limit = ("placement.workers_per_gpu=1",)
    control = serve(*limit)
    environment = machine(tmp_path, 1)
    first = seek(environment, "main-0", *limit)
    first.answer()
    first.process.send_signal(signal.SIGSTOP)
    try:
        control.until(lambda s: s["workers"][0]["condition"] == "silent")
        refused = seek(environment, "main-1", *limit, "placement.wait_seconds=1").answer()
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert "locked by processes of which nothing is heard" in refused["error"]
    control.until(lambda s: holders(s) == {"GPU-0000": ["main-0"]})


def test_a_fresh_control_plane_listens_before_it_grants(serve: Callable[..., Served]) -> None:
    control = serve("control_plane.heartbeat_seconds=30")
    line = Line(control.directory)
    claim = GpuClaim(gpus=(gpu(0),), num_bytes=GIB)
    try:
        reply = line.ask(beat("drafter_worker", phase="loading", claim=claim))
        assert "first hears who has which GPU" in reply.place.reason
        # What is held already is noted, and needs no answer.
        held = claim.model_copy(update={"held": "GPU-0000"})
        assert line.ask(beat("drafter_worker", session=2, claim=held)).place is None
    finally:
        line.close()
    assert holders(control.status()) == {"GPU-0000": ["worker-0"]}


def test_a_grant_is_repeated_until_it_is_held(serve: Callable[..., Served]) -> None:
    control = serve("control_plane.heartbeat_seconds=0.05", "placement.workers_per_gpu=1")
    line = Line(control.directory)
    claim = GpuClaim(gpus=(gpu(0), gpu(1)), num_bytes=GIB)
    try:
        number = 1
        while not isinstance(place := line.ask(
            beat("drafter_worker", number=number, claim=claim)).place, GpuGrant
        ):  # fmt: skip
            number += 1
        again = line.ask(beat("drafter_worker", number=number + 1, claim=claim)).place
        assert again == place
        other = line.ask(beat("drafter_worker", session=2, instance="worker-1", claim=claim)).place
        assert {place.gpu_uuid, other.gpu_uuid} == {"GPU-0000", "GPU-0001"}
        # The lock of the granted one was another's.
        taken = claim.model_copy(update={"locked": (place.gpu_uuid,)})
        refused = line.ask(beat("drafter_worker", number=number + 2, claim=taken)).place
        assert "locked by processes" in refused.reason
        assert "has 1 of 1 workers" in refused.reason
    finally:
        line.close()


@pytest.mark.parametrize("service", ["drafter_worker", "target_server", "evaluator"])
def test_each_service_takes_its_place_before_it_loads_torch(
    tmp_path: Path, service: str, serve: Callable[..., Served]
) -> None:
    config = make_run(tmp_path, 20)
    control = serve()
    settings = (f"run.name={RUN}", f"run.directory={tmp_path / 'run'}", "run.device=cuda")
    arguments = [part for setting in settings for part in ("--set", setting)]
    # torch that cannot be loaded stops it behind the lease.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch is asked for')")
    environment = machine(tmp_path, 3)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--config", config, *arguments],
        capture_output=True, text=True, env=environment, timeout=WATCHDOG_SECONDS,
    )  # fmt: skip
    assert "GPU GPU-0000 (H200): granted by the control plane" in done.stderr
    assert "torch is asked for" in done.stderr
    assert done.returncode == 1
    assert control.until(lambda s: holders(s) == {})


def test_a_worker_that_finds_no_place_says_so_while_it_waits(
    tmp_path: Path, seek: Open, serve: Callable[..., Served]
) -> None:
    control = serve()
    environment = machine(tmp_path, 1, free=GIB)
    seeker = seek(environment, "main-0", num_bytes=2 * GIB)
    reason = "has 1.0 GiB free of the 2.0 GiB that it takes"
    control.until(
        lambda s: any(w["phase"] == "waiting" and reason in w["detail"] for w in s["workers"])
    )
    file = Path(environment["FAKE_NVML"])
    file.write_text(json.dumps([json.loads(file.read_text())[0] | {"free": 5 * GIB}]))
    assert seeker.answer()["uuid"] == "GPU-0000"


def test_a_stop_ends_the_search(tmp_path: Path, seek: Open, serve: Callable[..., Served]) -> None:
    control = serve()
    seeker = seek(machine(tmp_path, 1, free=GIB), "main-0", num_bytes=2 * GIB)
    control.until(lambda s: [w for w in s["workers"] if w["phase"] == "waiting"])
    assert seeker.end(signal.SIGTERM) == 0
    assert seeker.said() == ""
