"""Debian's Prometheus, outside of the containers, with the project's own configuration."""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docker.stack import ROOT, free_port

Query = Callable[..., dict[str, Any]]
_FILES = ROOT / "compose" / "prometheus"


@contextlib.contextmanager
def prometheus(folder: Path, scraped_port: int) -> Iterator[Query]:
    """Run it on what compose publishes, and give the function that asks its API."""
    program = _find(folder)
    shutil.copy(_FILES / "alerts.yml", folder)
    config = (_FILES / "prometheus.yml").read_text()
    assert "namespaces:8765" in config
    config = config.replace("namespaces:8765", f"127.0.0.1:{scraped_port}")
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
               f"--web.listen-address={address}"]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield lambda what, text="": _ask(f"http://{address}/api/v1/{what}", text)
    finally:
        process.terminate()
        process.wait()


def _ask(url: str, text: str) -> dict[str, Any]:
    transport = httpx.HTTPTransport(retries=8)  # it is still starting
    with httpx.Client(transport=transport, timeout=30) as client:
        while (
            answer := client.get(url, params={"query": text} if text else {})
        ).status_code == 503:
            pass
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def _find(folder: Path) -> Path:
    """Return the program, from Debian's package where it is not installed; skip without it."""
    if found := shutil.which("prometheus"):
        return Path(found)
    fetched = subprocess.run(
        ["apt-get", "-o", "APT::Sandbox::User=root", "download", "--quiet=2", "prometheus"],
        cwd=folder,
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if fetched.returncode or not packages:
        pytest.skip("there is no prometheus, and apt-get cannot download Debian's")
    subprocess.run(["dpkg", "--extract", packages[0], folder / "package"], check=True)
    return folder / "package" / "usr" / "bin" / "prometheus"
