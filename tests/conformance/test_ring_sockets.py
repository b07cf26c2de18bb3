"""Where a ring's socket may be, and who may use it: paths, ports, keys, over real connections."""

import contextlib
import os
import re
import select
import socket as network
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from common.config.shared import RingTable, RunTable
from common.errors import ConfigError
from common.lifecycle import FileLock
from common.ring.endpoint import Endpoint, TcpEndpoint, ring_endpoint
from common.ring.owner import RingOwner
from services.control_plane.registry import Registry
from services.control_plane.socket import ControlSocket
from tests.rings import (
    Reader,
    free_port,
    make_groups,
    make_schema,
    make_table,
    publish,
    segments_of,
    wait_until,
)

RUN = f"sockets-{os.getpid()}"
DOCUMENT = Path(__file__).parents[2] / "docs" / "ring-protocol.md"
LOOPBACKS = ["127.0.0.1", "localhost", "::1"]


def has_ipv6() -> bool:
    try:
        with network.socket(network.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def tcp(folder: Path, host: str = "127.0.0.1", keys: Path | None = None) -> TcpEndpoint:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port(host if host != "localhost" else "127.0.0.1")
    return TcpEndpoint(host, port, folder / "target-0.sock", keys)


@contextlib.contextmanager
def owner_at(endpoint: Endpoint, **table: Any) -> Iterator[RingOwner]:
    with RingOwner(endpoint=endpoint, run=RUN, schema=make_schema(), table=make_table(**table),
                   groups=make_groups()) as owner:  # fmt: skip
        yield owner
    assert segments_of(RUN) == []


@contextlib.contextmanager
def reader_at(endpoint: Endpoint, worker_id: str = "w") -> Iterator[Reader]:
    with contextlib.closing(Reader(endpoint, worker_id)) as reader:
        yield reader


def documented_command() -> str:
    """Return the commands that the documentation gives for making keys."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.fixture(scope="session")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make keys as the documentation says, under a umask that would let everybody read them."""
    folder = tmp_path_factory.mktemp("documented")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", "umask 000\n" + documented_command()], cwd=folder, check=True,
                   env={**os.environ, "PATH": path})  # fmt: skip
    return folder / "curve"


@pytest.fixture
def keys(key_folder: Path, tmp_path: Path) -> Path:
    """Lend a copy of the documented keys."""
    copy = tmp_path / "keys"
    subprocess.run(["cp", "-a", key_folder, copy], check=True)
    return copy


# -- loopback --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_ring_at_a_loopback_port_carries_rows(tmp_path: Path, host: str) -> None:
    endpoint = tcp(tmp_path, host)
    with owner_at(endpoint) as owner, reader_at(endpoint) as reader:
        for sequence in range(10):
            publish(owner, sequence)
            assert reader.next_row() == sequence


def test_a_port_is_listened_at_on_its_own_address_alone(tmp_path: Path) -> None:
    endpoint = tcp(tmp_path)
    with owner_at(endpoint), network.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", endpoint.port))


def test_each_target_server_has_a_port_of_its_own() -> None:
    run, ring = RunTable(), RingTable(address="tcp://[::1]:65534")
    assert [str(ring_endpoint(run, ring, index)) for index in range(2)] == [
        "tcp://[::1]:65534",
        "tcp://[::1]:65535",
    ]
    with pytest.raises(ConfigError, match="target server 2 would be at port 65536"):
        ring_endpoint(run, ring, 2)


def test_without_an_address_a_ring_is_at_a_path_in_the_run_directory() -> None:
    run = RunTable(directory=Path("there"))
    assert ring_endpoint(run, RingTable(), 3) == Path("there/target-3.sock")


def test_a_port_that_is_taken_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    endpoint = tcp(tmp_path)
    with (
        owner_at(endpoint),
        pytest.raises(ConfigError, match=r"in use.*; choose another ring\.addr"),
    ):
        RingOwner(endpoint=endpoint, run=RUN, schema=make_schema(), table=make_table(),
                  groups=make_groups())  # fmt: skip


def test_a_killed_owner_at_a_port_is_followed_as_one_at_a_path_is(tmp_path: Path) -> None:
    endpoint = tcp(tmp_path)
    endpoint.path.touch()  # what a killed one leaves
    with owner_at(endpoint, resume_wait_seconds=0.4) as owner:
        assert owner.loan(0.1) is None
        assert owner.loan(10.0) is not None
    assert not endpoint.path.exists()
    with owner_at(endpoint, resume_wait_seconds=60.0) as owner:
        assert owner.loan(0.1) is not None


def test_a_reader_goes_on_with_the_next_owner_at_a_port(tmp_path: Path) -> None:
    endpoint = tcp(tmp_path)
    with reader_at(endpoint) as reader:
        for sequence in range(2):
            with owner_at(endpoint, resume_wait_seconds=0.0) as owner:
                publish(owner, sequence)
                assert reader.next_row() == sequence


# -- beyond loopback -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.0.2.1", "[::]", "example.org", "127.0.0.1.nip.io"]
)
def test_a_config_with_an_open_address_is_refused_and_names_the_ways_out(host: str) -> None:
    with pytest.raises(ValueError, match=r"set curve_directory .*'ipc' or 'tcp://127\.0\.0\.1"):
        RingTable(address=f"tcp://{host}:5555")
    assert RingTable(address=f"tcp://{host}:5555", curve_directory=Path("keys"))


@pytest.mark.parametrize(
    "address",
    ["", "tcp", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://*:5555",
     "tcp://::1:5555", "udp://127.0.0.1:5555", "ipc://x", "tcp://127.0.0.1:5555/", "tcp://a:b@127.0.0.1:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_examples(address: str) -> None:
    with pytest.raises(ValueError, match="expected 'ipc' or 'tcp://<host>:<port>'"):
        RingTable(address=address)


def test_keys_for_a_socket_that_needs_none_are_refused() -> None:
    with pytest.raises(ValueError, match="is for address = 'tcp://"):
        RingTable(curve_directory=Path("keys"))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_no_socket_is_bound_beyond_loopback_without_keys(tmp_path: Path, host: str) -> None:
    endpoint = TcpEndpoint(host, free_port(), tmp_path / "target-0.sock")
    with pytest.raises(ConfigError, match=r"not loopback: set ring\.curve_directory"):
        RingOwner(endpoint=endpoint, run=RUN, schema=make_schema(), table=make_table(),
                  groups=make_groups())  # fmt: skip
    with reader_at(endpoint) as reader, pytest.raises(ConfigError, match="not loopback"):
        reader.take()
    assert segments_of(RUN) == []


def test_a_host_that_nobody_knows_is_named(tmp_path: Path) -> None:
    endpoint = TcpEndpoint("no-such-host.invalid", 5555, tmp_path / "target-0.sock", tmp_path)
    with reader_at(endpoint) as reader, pytest.raises(ConfigError, match="no-such-host"):
        reader.take()


# -- keys ------------------------------------------------------------------------------------------


def test_whoever_has_a_known_key_is_served_beyond_loopback(tmp_path: Path, keys: Path) -> None:
    bound = TcpEndpoint("0.0.0.0", free_port(), tmp_path / "target-0.sock", keys)
    called = TcpEndpoint("127.0.0.1", bound.port, bound.path, keys)
    with owner_at(bound) as owner, reader_at(called) as reader:
        publish(owner, 0)
        assert reader.next_row() == 0
        assert owner.report().refused_messages == {}


def others_keys(kind: str, keys: Path, folder: Path) -> Path | None:
    """Return the keys of somebody who is not let in."""
    if kind == "none":
        return None
    theirs = folder / "theirs"
    subprocess.run(["cp", "-a", keys, theirs], check=True)
    name, place = ("worker", theirs / "clients") if kind == "client" else ("server", theirs)
    _, secret = zmq.auth.create_certificates(place, name)
    Path(secret).chmod(0o600)
    return theirs


REFUSALS = {
    "none": r"same ring\.curve_directory",
    "client": "does not know this worker's CURVE key",
    "server": r"with CURVE, server\.key .* must be the target server's",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_worker_with_other_keys_is_told_what_is_wrong_and_counted(
    tmp_path: Path, keys: Path, kind: str
) -> None:
    endpoint = tcp(tmp_path, keys=keys)
    stranger = TcpEndpoint(
        endpoint.host, endpoint.port, endpoint.path, others_keys(kind, keys, tmp_path)
    )
    with owner_at(endpoint) as owner, reader_at(endpoint) as reader:
        publish(owner, 0)
        with reader_at(stranger, "s") as other, pytest.raises(ConfigError, match=REFUSALS[kind]):
            other.take()
        wait_until(lambda: owner.report().refused_messages.get("handshake", 0) > 0, "it is counted")
        assert reader.next_row() == 0


def test_a_worker_with_keys_is_told_when_the_target_server_has_none(
    tmp_path: Path, keys: Path
) -> None:
    endpoint = tcp(tmp_path)
    called = TcpEndpoint(endpoint.host, endpoint.port, endpoint.path, keys)
    refusal = pytest.raises(ConfigError, match=r"same ring\.curve_directory")
    with owner_at(endpoint), reader_at(called) as reader, refusal:
        reader.take()


def test_another_program_at_the_port_is_no_target_server(tmp_path: Path) -> None:
    endpoint = tcp(tmp_path)
    with network.create_server(("127.0.0.1", endpoint.port)) as server:
        answering = threading.Thread(target=answer_as_a_web_server, args=(server,))
        answering.start()
        with (
            reader_at(endpoint) as reader,
            pytest.raises(ConfigError, match=r"another program|closes every"),
        ):
            reader.take()
        server.shutdown(network.SHUT_RDWR)
        answering.join()


def answer_as_a_web_server(server: network.socket) -> None:
    with contextlib.suppress(OSError):  # until it is shut down
        while True:
            line, _ = server.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("with_keys", [True, False])
def test_messages_are_encrypted_where_there_are_keys(
    tmp_path: Path, keys: Path, with_keys: bool
) -> None:
    endpoint = tcp(tmp_path, keys=keys if with_keys else None)
    with relay(endpoint.port) as (port, seen), owner_at(endpoint) as owner:
        called = TcpEndpoint(endpoint.host, port, endpoint.path, endpoint.curve_directory)
        with reader_at(called) as reader:
            publish(owner, 0)
            assert reader.next_row() == 0
        # The first message of a worker names itself; a descriptor names its fields.
        assert (b"Hello" in seen) is not with_keys
        assert (b"token_hash" in seen) is not with_keys


@contextlib.contextmanager
def relay(port: int) -> Iterator[tuple[int, bytearray]]:
    """Pass one connection on to a port, and keep what it carries."""
    seen = bytearray()
    with network.create_server(("127.0.0.1", 0)) as server:

        def carry() -> None:
            inner, _ = server.accept()
            outer = network.create_connection(("127.0.0.1", port))
            with inner, outer:
                other = {inner: outer, outer: inner}
                while True:
                    for end in select.select([inner, outer], [], [])[0]:
                        data = end.recv(65536)
                        if not data:
                            return
                        seen.extend(data)
                        other[end].sendall(data)

        carrying = threading.Thread(target=carry)
        carrying.start()
        yield server.getsockname()[1], seen
        carrying.join(60)


BROKEN_KEYS = {
    "server.key_secret": ("owner", "cannot be read"),
    "server.key": ("worker", "cannot be read"),
    "clients/worker.key": ("owner", r"no \*.key file"),
    "clients/worker.key_secret": ("worker", "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN_KEYS)
def test_a_missing_key_is_named_with_the_page_that_helps(
    tmp_path: Path, keys: Path, name: str
) -> None:
    side, problem = BROKEN_KEYS[name]
    (keys / name).unlink()
    with pytest.raises(ConfigError, match=problem + r".*docs/ring-protocol\.md, Sockets"):
        open_side(side, tcp(tmp_path, keys=keys))
    assert segments_of(RUN) == []


@pytest.mark.parametrize("name", ["server.key_secret", "clients/worker.key_secret"])
def test_a_secret_key_that_others_can_read_is_refused(
    tmp_path: Path, keys: Path, name: str
) -> None:
    (keys / name).chmod(0o640)
    with pytest.raises(ConfigError, match="has mode 0640, expected 0600"):
        open_side("owner" if name.startswith("server") else "worker", tcp(tmp_path, keys=keys))


@pytest.mark.parametrize("text", ["", 'curve\n    public-key = "short"\n'])
def test_a_client_key_that_is_none_is_refused(tmp_path: Path, keys: Path, text: str) -> None:
    (keys / "clients" / "other.key").write_text(text)
    with pytest.raises(ConfigError, match=r"other\.key"):
        open_side("owner", tcp(tmp_path, keys=keys))


def open_side(side: str, endpoint: TcpEndpoint) -> None:
    if side == "owner":
        with owner_at(endpoint):
            return
    with reader_at(endpoint) as reader:
        reader.take()


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let every file be open to everybody, where nothing else is said."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("kind", ["path", "port"])
def test_socket_and_segment_are_their_owner_s_alone(tmp_path: Path, kind: str) -> None:
    endpoint = tmp_path / "target-0.sock" if kind == "path" else tcp(tmp_path)
    with owner_at(endpoint):
        (name,) = segments_of(RUN)
        for path in (tmp_path / "target-0.sock", Path("/dev/shm") / name):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("open_umask")
def test_the_control_socket_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with contextlib.closing(ControlSocket(path, Registry("run", 1.0))):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("open_umask")
def test_a_run_directory_that_is_made_is_its_owner_s_alone(tmp_path: Path) -> None:
    with FileLock(tmp_path / "run" / "a.lock", "test").acquire("stop"):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
