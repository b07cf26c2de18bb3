"""The compose files on a real engine: three workers train, die, come back; nothing stays behind.

Tests of the first stack stand in the order in which they use it, and each leaves it running.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker.prometheus import Query, prometheus
from tests.docker.stack import BUILD_SECONDS, ROOT, SERVICES, Stack, docker, why_no_engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_SECONDS)]
TOKEN = "hf_test_of_a_secret"


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """Images of this tree, also for one test alone."""
    if reason := why_no_engine():
        pytest.skip(reason)
    Stack("build").compose("build")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    secret = tmp_path_factory.mktemp("secret") / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o644)
    stack = Stack("run", HF_TOKEN_FILE=str(secret))
    yield stack
    stack.down()


def test_three_workers_train(stack: Stack) -> None:
    started_at = time.monotonic()
    stack.up("--scale", "drafter-worker=3")
    stack.wait_for_steps(1)
    print(f"first trained row {time.monotonic() - started_at:.1f} s behind `up`")
    workers = stack.wait_for_steps(3)
    assert sorted(workers) == ["main-0", "main-1", "main-2"]
    # One PID namespace: no two services have the same PID.
    assert len({worker["pid"] for worker in workers.values()}) == 3
    status = stack.status()
    assert status["transport"]["chosen"] == "host"
    assert sum(worker["report"]["trained_rows"] for worker in workers.values()) > 2


def test_services_are_confined(stack: Stack) -> None:
    for service in SERVICES:
        for container in stack.containers(service):
            (found,) = json.loads(docker("inspect", container).stdout)
            host = found["HostConfig"]
            assert found["Config"]["User"] == "ringdraft", service
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"], service
            assert host["SecurityOpt"] == ["no-new-privileges:true"], service
            assert host["Init"], service
            assert host["LogConfig"]["Config"]["max-size"] == "10m", service
    probe = "touch /ringdraft/x || touch /etc/x || touch /ringdraft/models/x || id -u"
    said = stack.compose("exec", "-T", "target-server", "sh", "-c", probe).stdout
    assert said.strip() == "1000"


def test_the_hub_token_is_in_no_environment_log_or_record(stack: Stack) -> None:
    (model,) = stack.containers("model")
    assert TOKEN not in docker("inspect", *stack.containers()).stdout
    assert TOKEN not in stack.compose("logs", "--no-color").stdout
    records = "cat $(find /ringdraft/run -name '*.json')"
    said = stack.compose("exec", "-T", "control-plane", "sh", "-c", records).stdout
    assert '"target_fingerprint"' in said
    assert TOKEN not in said
    read = "from huggingface_hub import get_token; print(get_token())"
    found = stack.compose("run", "--rm", "--no-deps", "-T", "model", "python3", "-c", read)
    assert found.stdout.strip() == TOKEN, model


def test_health_follows_progress(stack: Stack) -> None:
    (target,) = stack.containers("target-server")
    stack.wait_for("healthy target", lambda: _health(target) == "healthy")
    for container in stack.containers("drafter-worker"):
        stack.wait_for("healthy worker", lambda c=container: _health(c) == "healthy")
    pid = _pid(stack, "main-1")
    _signal(stack, "STOP", pid)
    try:
        stack.wait_for("silence", lambda: "main-1" not in stack.workers())
        checks = [_check(container) for container in stack.containers("drafter-worker")]
        assert sorted(check.returncode for check in checks) == [0, 0, 1]
        assert any("main-1 is silent" in check.stdout for check in checks)
    finally:
        _signal(stack, "CONT", pid)
    stack.wait_for("main-1", lambda: "main-1" in stack.workers())


def test_a_killed_worker_comes_back(stack: Stack) -> None:
    before = stack.wait_for_steps(3)
    pid = before["main-1"]["pid"]
    _signal(stack, "KILL", pid)
    stack.wait_for(
        "other main-1", lambda: stack.workers().get("main-1", {"pid": pid})["pid"] != pid
    )
    counts = docker("inspect", "--format", "{{.RestartCount}}", *stack.containers("drafter-worker"))
    assert sorted(counts.stdout.split()) == ["0", "0", "1"]
    stack.wait_for_steps(3, beyond=before["main-0"]["report"]["step"])


def test_a_restarted_target_is_read_on(stack: Stack) -> None:
    before = stack.wait_for_steps(3)
    (ring,) = stack.status()["rings"]
    stack.compose("restart", "target-server")
    stack.wait_for("other ring", lambda: _epochs(stack) not in ([], [ring["ring_epoch"]]))
    assert _segments(stack) == 1
    after = stack.wait_for_steps(3, beyond=max(w["report"]["step"] for w in before.values()))
    assert {n: w["pid"] for n, w in after.items()} == {n: w["pid"] for n, w in before.items()}


def test_prometheus_scrapes_what_dashboard_and_alerts_ask_for(stack: Stack, tmp_path: Path) -> None:
    board = json.loads((ROOT / "compose/grafana/dashboards/ringdraft.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    with prometheus(tmp_path, stack.port) as query:
        up = stack.wait_for("scrape", lambda: _values(query("query", 'up{job="ringdraft"} == 1')))
        assert up == [1.0]
        steps = stack.wait_for("steps", lambda: _values(query("query", "drafter_steps_total")))
        assert len(steps) == 3
        assert min(steps) > 0
        for text in queries:
            assert query("query", text)["resultType"] == "vector", text
        stack.wait_for("rules", lambda: _rules_are_evaluated(query))


def test_what_was_killed_as_a_whole_starts_clean(stack: Stack) -> None:
    before = stack.wait_for_steps(3, beyond=10)  # a checkpoint behind each
    stack.compose("kill")
    assert not stack.status()
    stack.up("--scale", "drafter-worker=3")
    after = stack.wait_for_steps(3)
    assert _segments(stack) == 1
    assert {w["session"] for w in after.values()}.isdisjoint(w["session"] for w in before.values())
    assert min(worker["report"]["step"] for worker in after.values()) >= 10


def test_down_leaves_nothing(stack: Stack) -> None:
    assert stack.left()
    stack.down()
    assert not stack.left()


def test_workers_of_a_synced_group_meet_and_are_scored() -> None:
    stack = Stack("sync", RINGDRAFT_GROUPS__MAIN__SYNC="local_sgd")
    try:
        stack.up_with(("sync", "eval"), "--scale", "drafter-worker=2")
        workers = stack.wait_for_steps(2, beyond=6)
        assert all(worker["report"]["sync_seconds"] > 0 for worker in workers.values())
        stack.wait_for("two at a meeting", lambda: stack.status()["groups"][0]["num_members"] == 2)
        (quorum,) = stack.containers("quorum-server")
        stack.wait_for("healthy quorum server", lambda: _health(quorum) == "healthy")
        (score,) = stack.wait_for("evaluation", lambda: stack.status()["evaluations"])[:1]
        assert score["acceptance_length"] >= 1
        # One series for both.
        series = stack.compose("exec", "-T", "control-plane", "sh", "-c",
                               "ls -d /ringdraft/run/checkpoints/main/*/step-*").stdout.split()  # fmt: skip
        assert {path.split("/")[-2] for path in series} == {"0"}
    finally:
        stack.down()


def test_the_doctor_names_the_key_of_compose_that_its_container_lacks() -> None:
    stack = Stack("doctor")
    doctor = ("ringdraft", "doctor", "--config", "examples/smollm2/demo.toml")
    try:
        stack.up("target-server")
        stack.wait_for("ring", lambda: _epochs(stack))
        for how in (
            ("exec", "-T", "target-server"),
            ("run", "--rm", "-T", "--no-deps", "drafter-worker"),
        ):
            found = _findings(stack.compose(*how, *doctor).stdout)
            assert not [each for each in found.values() if each["state"] in ("failed", "warning")]
            assert found["namespaces"]["text"] == "target-0: in sight, with its memory"
            assert found["container"]["text"] == "confined, as user 1000"
            assert "the run's control plane" in found["port"]["text"]
            asked = stack.compose(*how, *doctor, "--set", "run.device=cuda", check=False)
            lacking = _findings(asked.stdout)
            assert asked.returncode == 1
            assert "`deploy.resources.reservations.devices`" in lacking["driver"]["fix"]
            assert "compose.gpu.yaml" in lacking["GPU"]["fix"]
        # The same image without what compose.yaml says of it, beside the same run.
        volumes = ("--volume", f"{stack.project}_run:/ringdraft/run",
                   "--volume", f"{stack.project}_models:/ringdraft/models:ro")  # fmt: skip
        settings = ("--set", "run.directory=/ringdraft/run", "--set",
                    "target.model=/ringdraft/models/SmolLM2-135M-Instruct")  # fmt: skip
        bare = docker("run", "--rm", "--user", "root", *volumes, "ringdraft:test", *doctor, *settings, check=False)  # fmt: skip
        found = _findings(bare.stdout)
        assert bare.returncode == 1
        assert found["namespaces"]["state"] == "failed"
        assert "`pid: service:namespaces`" in found["namespaces"]["fix"]
        assert "`shm_size`" in found["/dev/shm"]["fix"]
        for key in ("`user:", "`read_only: true`", "`cap_drop: [ALL]`", "`security_opt:"):
            assert key in found["container"]["fix"]
        shares = docker("run", "--rm", "--pid", f"container:{stack.containers('namespaces')[0]}",
                        "--tmpfs", "/tmp:noexec", *volumes, "ringdraft:test", *doctor, *settings, check=False)  # fmt: skip
        found = _findings(shares.stdout)
        assert "its memory is not in this /dev/shm" in found["namespaces"]["text"]
        assert "`ipc: service:namespaces`" in found["namespaces"]["fix"]
        assert "`tmpfs: [" in found["container"]["fix"]
    finally:
        stack.down()


def test_shared_memory_that_is_too_small_is_refused_with_the_size_it_takes() -> None:
    stack = Stack("shm", SHM_SIZE="64mb", NUM_SLOTS="128")
    try:
        stack.up("target-server")
        (target,) = stack.containers("target-server")
        logs = stack.wait_for(
            "refusal", lambda: "too small" in (said := docker("logs", target).stderr) and said
        )
        config = ("--config", "examples/smollm2/demo.toml")
        found = stack.compose("run", "--rm", "--no-deps", "-T", "target-server", "ringdraft",
                              "estimate", *config)  # fmt: skip
        estimate = json.loads(found.stdout)
        assert f"need {estimate['shared_memory']} bytes" in logs
        assert "of 67108864" in logs
        assert "shm_size" in logs
        assert int(estimate["shm_size"].removesuffix("m")) << 20 > estimate["shared_memory"]
    finally:
        stack.down()
    assert not stack.left()


def _findings(line: str) -> dict[str, dict[str, str]]:
    return {each["check"]: each for each in json.loads(line)["findings"]}


def _values(found: dict[str, Any]) -> list[float]:
    return [float(sample["value"][1]) for sample in found["result"]]


def _rules_are_evaluated(query: Query) -> bool:
    rules = query("rules")["groups"][0]["rules"]
    assert not [rule for rule in rules if rule["health"] == "err"]
    return all(rule["health"] == "ok" for rule in rules)


def _pid(stack: Stack, instance: str) -> int:
    return stack.wait_for(instance, lambda: stack.workers().get(instance))["pid"]


def _signal(stack: Stack, name: str, pid: int) -> None:
    """Signal a process of the run, from another container: they share the PID namespace."""
    stack.compose("exec", "-T", "namespaces", "sh", "-c", f"kill -{name} {pid}")


def _health(container: str) -> str:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container).stdout.strip()


def _check(container: str) -> subprocess.CompletedProcess[str]:
    command = ("python3", "/ringdraft/healthcheck.py", "progress")
    return docker("exec", container, *command, check=False)


def _epochs(stack: Stack) -> list[str]:
    return [ring["ring_epoch"] for ring in stack.status().get("rings", [])]


def _segments(stack: Stack) -> int:
    found = stack.compose("exec", "-T", "namespaces", "ls", "/dev/shm").stdout.split()
    return len([name for name in found if name.startswith("ringdraft-")])
