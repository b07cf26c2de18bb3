"""Every compose file is what Compose takes, with every profile; needs the command, not an engine."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROFILES = ("", "eval", "sync", "monitoring", "*")
FILES = ("compose.yaml", "compose.gpu.yaml")
OURS = {"namespaces", "model", "control-plane", "target-server", "drafter-worker", "quorum-server",
        "evaluator"}  # fmt: skip
GPU = {"target-server", "drafter-worker", "evaluator"}


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not has_compose(), reason="there is no docker compose here")


def resolved(file: str, profile: str, **variables: str) -> dict:
    command = ["docker", "compose", "--file", file, "--profile", profile, "config", "--format=json"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("profile", PROFILES)
def test_each_file_with_each_profile_is_accepted(file: str, profile: str) -> None:
    services = resolved(file, profile)["services"]
    always = OURS - {"quorum-server", "evaluator"}
    assert (
        set(services)
        == always
        | {
            "": set(),
            "eval": {"evaluator"},
            "sync": {"quorum-server"},
            "monitoring": {"prometheus", "grafana"},
            "*": {"evaluator", "quorum-server", "prometheus", "grafana"},
        }[profile]
    )


@pytest.mark.parametrize("file", FILES)
def test_every_service_is_confined(file: str) -> None:
    for name, service in resolved(file, "*")["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name


@pytest.mark.parametrize("file", FILES)
def test_services_of_the_run_live_in_the_namespaces_of_one(file: str) -> None:
    services = resolved(file, "*")["services"]
    assert services["namespaces"]["ipc"] == "shareable"
    for name in OURS - {"namespaces", "model"}:
        shared = {services[name][kind] for kind in ("ipc", "pid", "network_mode")}
        assert shared == {"service:namespaces"}, name


def test_those_that_compute_have_every_gpu_and_pinned_memory() -> None:
    services = resolved("compose.gpu.yaml", "*", CUDA_VISIBLE_DEVICES="1")["services"]
    for name, service in services.items():
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {})
        assert bool(devices) == (name in GPU), name
        if name in GPU:
            assert devices["devices"][0] | {"count": -1} == {
                "driver": "nvidia", "count": -1, "capabilities": ["gpu"]
            }  # fmt: skip
            assert service["ulimits"]["memlock"] in (-1, {"single": -1}), name
            assert service["environment"]["RINGDRAFT_RUN__DEVICE"] == "cuda"
            assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_hub_token_is_a_file_for_the_model_service_alone() -> None:
    found = resolved("compose.yaml", "*", HF_TOKEN_FILE="/some/token", HF_TOKEN="hf_secret")
    assert found["secrets"]["hf_token"]["file"] == "/some/token"
    assert [name for name, service in found["services"].items() if "secrets" in service] == [
        "model"
    ]
    assert "hf_secret" not in json.dumps(found)
