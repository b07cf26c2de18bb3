"""Whole runs whose rings are at ports: with the right keys they train, with others they say why."""

from pathlib import Path

import pytest
import zmq.auth

from tests.rings import free_port
from tests.runs import make_run, run_to_end, start, train


def make_keys(folder: Path) -> Path:
    """Make keys of target servers and workers."""
    (folder / "clients").mkdir(parents=True)
    for place, name in ((folder, "server"), (folder / "clients", "worker")):
        _, secret = zmq.auth.create_certificates(place, name)
        Path(secret).chmod(0o600)
    return folder


@pytest.mark.timeout(300)
def test_a_run_at_a_port_with_keys_trains_every_row(tmp_path: Path) -> None:
    config, keys = make_run(tmp_path), make_keys(tmp_path / "keys")
    settings = (f"ring.address=tcp://localhost:{free_port()}", f"ring.curve_directory={keys}")
    (summary,) = train(config, *settings)
    account = summary["groups"]["main"]
    assert account["rows_published"] == account["rows_trained"] > 20


@pytest.mark.timeout(200)
def test_a_worker_with_another_key_ends_with_code_2_and_the_reason(tmp_path: Path) -> None:
    config, keys = make_run(tmp_path), make_keys(tmp_path / "keys")
    others = make_keys(tmp_path / "others")
    (others / "server.key").write_bytes((keys / "server.key").read_bytes())
    address = ("--set", f"ring.address=tcp://127.0.0.1:{free_port()}")
    log = tmp_path / "run" / "logs" / "target.log"
    target = start("services.target_server", "--config", config, *address,
                   "--set", f"ring.curve_directory={keys}", log=log)  # fmt: skip
    try:
        done = run_to_end("services.drafter_worker", "--config", config, *address,
                          "--set", f"ring.curve_directory={others}")  # fmt: skip
        assert target.poll() is None, log.read_text()
    finally:
        target.terminate()
        target.wait(60)
    assert done.returncode == 2, done.stderr
    assert "does not know this worker's CURVE key" in done.stderr
    assert "Traceback" not in done.stderr
