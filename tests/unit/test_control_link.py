"""The services' line to the control plane, against a real ROUTER in this process."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from common.contracts.codec import encode
from common.contracts.control_messages import (
    CONTROL_PLANE_DECODER,
    Command,
    ServiceGoodbye,
    ServiceHeartbeat,
    ServiceReply,
)
from common.telemetry.control_link import ControlLink, Identity, ServiceState

WATCHDOG_MILLISECONDS = 20_000


class Router:
    """The control plane's end of the line."""

    def __init__(self, context: zmq.Context, path: Path) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{path}")

    def receive(self) -> tuple[bytes, ServiceHeartbeat | ServiceGoodbye]:
        assert self.socket.poll(WATCHDOG_MILLISECONDS), "nothing came"
        peer, raw = self.socket.recv_multipart()
        return peer, CONTROL_PLANE_DECODER.decode(raw)

    def until(self, wanted: Callable[[ServiceHeartbeat | ServiceGoodbye], bool]):
        while True:
            peer, message = self.receive()
            if wanted(message):
                return peer, message

    def reply(self, peer: bytes, session: int, *commands: Command) -> None:
        reply = ServiceReply(session=session, number=1, heartbeat_seconds=0.05, commands=commands)
        self.socket.send_multipart([peer, encode(reply)])


@pytest.fixture
def open_router() -> Iterator[Callable[[Path], Router]]:
    context = zmq.Context()
    routers: list[Router] = []

    def open_one(path: Path) -> Router:
        routers.append(Router(context, path))
        return routers[-1]

    yield open_one
    for router in routers:
        router.socket.close()
    context.term()


def open_link(path: Path, describe=None, on_command=None) -> ControlLink:
    return ControlLink(
        Identity("drafter_worker", "worker-0", "demo"), path, interval_seconds=0.05,
        describe=describe or (lambda: ServiceState("running", "training", 7)),
        on_command=on_command or (lambda command: None),
    )  # fmt: skip


def test_heartbeats_carry_the_state_under_one_session_with_rising_numbers(
    tmp_path, open_router
) -> None:
    router = open_router(tmp_path / "control.sock")
    with open_link(tmp_path / "control.sock") as link:
        beats = [router.receive()[1] for _ in range(3)]
    assert {beat.session for beat in beats} == {link.session}
    assert [beat.number for beat in beats] == sorted({beat.number for beat in beats})
    assert (beats[0].phase, beats[0].detail, beats[0].progress) == ("running", "training", 7)


def test_each_command_is_given_once_and_in_order(tmp_path, open_router) -> None:
    router = open_router(tmp_path / "control.sock")
    commands: queue.Queue[Command] = queue.Queue()
    pause, resume = Command(name="pause", number=4), Command(name="resume", number=9)
    with open_link(tmp_path / "control.sock", on_command=commands.put) as link:
        for _ in range(3):
            peer, _ = router.receive()
            router.reply(peer, link.session, resume, pause)
        router.reply(peer, link.session + 1, Command(name="stop", number=10))
        router.reply(peer, link.session, Command(name="drain", number=11))
        got = [commands.get(timeout=20) for _ in range(3)]
    assert [command.name for command in got] == ["pause", "resume", "drain"]
    assert commands.empty()


def test_a_malformed_reply_is_dropped_and_the_link_goes_on(tmp_path, open_router) -> None:
    router = open_router(tmp_path / "control.sock")
    commands: queue.Queue[Command] = queue.Queue()
    with open_link(tmp_path / "control.sock", on_command=commands.put) as link:
        peer, _ = router.receive()
        router.socket.send_multipart([peer, b"\xc1not msgpack"])
        router.reply(peer, link.session, Command(name="stop", number=1))
        assert commands.get(timeout=20).name == "stop"


def test_close_says_goodbye_with_the_exit_code(tmp_path, open_router) -> None:
    router = open_router(tmp_path / "control.sock")
    link = open_link(tmp_path / "control.sock").start()
    router.receive()
    link.close(1, "out of memory")
    link.close(0, "a second call does nothing")
    _, goodbye = router.until(lambda message: isinstance(message, ServiceGoodbye))
    assert (goodbye.exit_code, goodbye.reason, goodbye.session) == (
        1,
        "out of memory",
        link.session,
    )


def fail_inside(link: ControlLink, router: Router) -> None:
    with link:
        router.receive()
        raise ValueError("bad row")


def test_an_exception_inside_the_link_is_the_reason_of_the_goodbye(tmp_path, open_router) -> None:
    router = open_router(tmp_path / "control.sock")
    with pytest.raises(ValueError, match="bad row"):
        fail_inside(open_link(tmp_path / "control.sock"), router)
    _, goodbye = router.until(lambda message: isinstance(message, ServiceGoodbye))
    assert (goodbye.exit_code, goodbye.reason) == (1, "ValueError: bad row")


def test_the_link_reports_to_a_control_plane_that_starts_late_or_comes_back(
    tmp_path, open_router
) -> None:
    path = tmp_path / "control.sock"
    with open_link(path) as link:
        for _ in range(2):
            router = open_router(path)
            assert router.receive()[1].session == link.session
            router.socket.close()


def test_close_returns_with_no_control_plane_at_all(tmp_path) -> None:
    link = open_link(tmp_path / "control.sock").start()
    link.close(0, "done")
    assert not link._thread.is_alive()


def test_a_change_of_phase_is_reported_before_the_interval_is_over(tmp_path, open_router) -> None:
    router = open_router(tmp_path / "control.sock")
    phase = ["loading"]
    link = ControlLink(
        Identity("target_server", "target-0", "demo"), tmp_path / "control.sock",
        interval_seconds=3600.0, describe=lambda: ServiceState(phase[0]),
        on_command=lambda command: None,
    )  # fmt: skip
    with link:
        assert router.receive()[1].phase == "loading"
        phase[0] = "running"
        link.report_soon()
        assert router.receive()[1].phase == "running"
