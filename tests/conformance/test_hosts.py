"""Whoever asks for the control plane by a name that is not its own is refused, as DNS rebinding does."""

import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.control_planes import Served, refusal

COMPOSE = Path(__file__).parents[2] / "compose"
ALLOWED = "RINGDRAFT_CONTROL_PLANE__ALLOWED_HOSTS"


def code(served: Served, host: str, path: str = "/status") -> int:
    return served.http.get(path, headers={"host": host}).status_code


@pytest.mark.parametrize(
    "path", ["/", "/status", "/events", "/history", "/metrics", "/static/main.js"]
)
def test_a_page_with_a_name_of_its_own_reads_nothing(served: Served, path: str) -> None:
    port = served.http.base_url.port
    answer = served.http.get(path, headers={"host": f"evil.example:{port}"})
    assert answer.status_code == 400
    for word in ("evil.example", "control_plane.allowed_hosts", "127.0.0.1"):
        assert word in answer.json()["detail"]


@pytest.mark.parametrize(
    "host",
    ["localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost", "namespaces", "", "[x"],
)
def test_what_only_looks_like_a_known_name_is_refused(served: Served, host: str) -> None:
    assert code(served, host) == 400


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8765", "localhost", "LocalHost:1", "localhost.", "run.localhost:8765",
     "[::1]:8765", "192.168.1.5:8765", socket.gethostname()],
)  # fmt: skip
def test_numbers_and_names_of_this_machine_are_known(served: Served, host: str) -> None:
    assert code(served, host) == 200


def test_a_request_without_a_host_is_answered(served: Served) -> None:
    address = ("127.0.0.1", served.http.base_url.port)
    with socket.create_connection(address, timeout=30) as line:
        line.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in line.recv(1000)


def test_other_names_are_let_in_by_the_config(directory: Path) -> None:
    served = Served(directory, 'control_plane.allowed_hosts=["Train.lan"]')
    with contextlib.closing(served):
        assert code(served, "train.lan:8765") == 200
        assert code(served, "other.lan:8765") == 400


def test_what_is_no_name_is_refused_by_the_config(directory: Path) -> None:
    exit_code, text = refusal(directory, 'control_plane.allowed_hosts=["http://train.lan:80"]')
    assert exit_code == 2
    assert "control_plane.allowed_hosts" in text
    assert "without scheme, port" in text


def test_prometheus_of_the_compose_files_is_let_in(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [name for job in jobs for each in job["static_configs"] for name in each["targets"]]
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert {urlsplit(f"//{target}").hostname for target in targets} <= set(services)
    monkeypatch.setenv(ALLOWED, services["control-plane"]["environment"][ALLOWED])
    with contextlib.closing(Served(directory)) as served:
        assert {code(served, target, "/metrics") for target in targets} == {200}
