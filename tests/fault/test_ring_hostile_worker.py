"""Anything that an owner may say: a worker opens no foreign file, reads no foreign byte.

A false owner stands between a real ring and a worker: it passes on what it is told to, changed.
"""

import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.contracts.codec import encode
from common.contracts.record import Record
from common.contracts.ring_messages import (
    OWNER_DECODER,
    WORKER_DECODER,
    Descriptor,
    Heartbeat,
    Hello,
    Nack,
    Release,
    Welcome,
)
from common.errors import LayoutMismatchError, MessageError, RingError
from common.ring import segment as segments
from common.ring.consumer import RingConsumer
from common.ring.endpoint import Listener
from common.ring.owner import RingOwner
from tests.hostile import WORKER_HEARS, any_record, mutate
from tests.rings import (
    Reader,
    make_groups,
    make_schema,
    make_table,
    publish,
    wait_until,
)
from tests.row_bytes import FIELDS, is_content

PATIENT = {"lease_seconds": 60.0, "lease_max_seconds": 60.0, "session_timeout_seconds": 60.0}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a folder of its own in /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rd-test-") as folder:
        monkeypatch.setattr(segments, "SEGMENT_DIRECTORY", Path(folder))
        yield Path(folder)


@dataclass
class FalseOwner:
    """A ROUTER that answers each Hello with `welcome`, and says what a test tells it to."""

    endpoint: Path
    welcome: Callable[[Hello], Record | None] = lambda hello: None
    heard: list[Record] = field(default_factory=list)
    identity: bytes = b""

    def __post_init__(self) -> None:
        self._listener = Listener(self.endpoint)
        self._stop = threading.Event()
        self._to_say: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, *messages: Record | bytes) -> None:
        """Say it to the session that spoke last."""
        self._to_say += [m if isinstance(m, bytes) else encode(m) for m in messages]
        wait_until(lambda: not self._to_say, "it is said")

    def has_heard(self, kind: type[Record], count: int = 1) -> bool:
        return sum(isinstance(record, kind) for record in self.heard) >= count

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()
        self._listener.unlink()

    def _run(self) -> None:
        socket = self._listener.socket
        while not self._stop.is_set():
            if socket.poll(10):
                self.identity, raw = socket.recv_multipart()
                record = OWNER_DECODER.decode(raw)
                self.heard.append(record)
                answer = self.welcome(record) if isinstance(record, Hello) else None
                if answer is not None:
                    socket.send_multipart([self.identity, encode(answer)])
            while self._to_say:
                socket.send_multipart([self.identity, self._to_say[0]], zmq.DONTWAIT)
                self._to_say.pop(0)


@dataclass
class Trap:
    """A real ring with one published row and its real lease, and a false owner for a worker."""

    owner: RingOwner
    false: FalseOwner
    told: Descriptor
    place: Path

    def real_welcome(self, hello: Hello) -> Welcome:
        return self.owner._protocol._welcome(hello.session)

    def worker(self) -> RingConsumer:
        return RingConsumer(
            endpoint=self.false.endpoint, worker_id="victim", group="main", capacity=2
        )


@pytest.fixture
def trap(place: Path) -> Iterator[Trap]:
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        real = Path(folder) / "target-0.sock"
        with RingOwner(
            endpoint=real, run="trap", schema=make_schema(), table=make_table(**PATIENT),
            groups=make_groups(),
        ) as owner:  # fmt: skip
            reader, false = Reader(real, "spy"), FalseOwner(Path(folder) / "false.sock")
            publish(owner, 7)
            assert reader.take() == 7
            yield Trap(owner, false, reader.descriptor(7), place)
            false.close()
            reader.close()


NAME = f"ringdraft-trap-1-0123abcd-{1:016x}"
SECRET = b"not a ring's" * 4096


def put(path: Path, num_bytes: int, mode: int = 0o600, uid: int = -1) -> None:
    """Make a file that could be a ring's, but for one thing."""
    path.write_bytes(bytes(num_bytes))
    path.chmod(mode)
    os.chown(path, uid, uid)


def put_link(path: Path, num_bytes: int) -> None:
    """Link to a file that could be a ring's."""
    put(path.with_name("outside"), num_bytes)
    path.symlink_to(path.with_name("outside"))


FOREIGN: dict[str, tuple[Callable[[Path, int], object], dict[str, Any]]] = {
    "a path": (lambda path, size: None, {"name": "../../etc/passwd"}),
    "an absolute path": (lambda path, size: None, {"name": "/etc/passwd"}),
    "a path under a ring's name": (lambda path, size: path.mkdir(), {"name": f"{NAME}/../outside"}),
    "a name that is no ring's": (lambda path, size: None, {"name": "outside"}),
    "a NUL": (lambda path, size: put(path, size), {"name": f"{NAME}\0"}),
    "a link": (lambda path, size: put_link(path, size), {"name": NAME}),
    "a dangling link": (lambda path, size: path.symlink_to(path.with_name("x")), {"name": NAME}),
    "a directory": (lambda path, size: path.mkdir(), {"name": NAME}),
    "a fifo": (lambda path, size: os.mkfifo(path, 0o600), {"name": NAME}),
    "nothing": (lambda path, size: None, {"name": NAME}),
    "a longer file": (lambda path, size: put(path, size + 4096), {"name": NAME}),
    "a shorter file": (lambda path, size: put(path, size - 4096), {"name": NAME}),
    "an empty file": (lambda path, size: put(path, 0), {"name": NAME}),
    "a file that its group may read": (lambda path, size: put(path, size, 0o640), {"name": NAME}),
    "a file that others may write": (lambda path, size: put(path, size, 0o602), {"name": NAME}),
    "more bytes than there are": (lambda path, size: None, {"num_bytes": 1 << 62}),
    "more slots than there are": (lambda path, size: None, {"num_slots": 1 << 40}),
    "memory of another process": (lambda path, size: None, {"backing": "memory"}),
    "a GPU's memory": (lambda path, size: None, {"backing": "cuda_ipc", "handle": bytes(64)}),
}
if os.geteuid() == 0:  # nobody else can give a file away
    FOREIGN["a file of another user"] = (
        lambda path, size: put(path, size, uid=4321),
        {"name": NAME},
    )


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_welcome_that_names_something_foreign_ends_in_a_clear_error(
    trap: Trap, kind: str
) -> None:
    prepare, changes = FOREIGN[kind]
    (trap.place / "outside").write_bytes(SECRET)
    prepare(trap.place / NAME, trap.owner._segment.ref.num_bytes)

    def lie(hello: Hello) -> Record | None:
        truth = trap.real_welcome(hello)
        return truth.model_copy(update={"segment": truth.segment.model_copy(update=changes)})

    trap.false.welcome = lie
    before = look_at(trap.place)
    worker = trap.worker()
    with pytest.raises(RingError):
        worker.acquire(60.0)
    worker.close()
    assert look_at(trap.place) == before


def look_at(place: Path) -> dict[str, tuple[int, ...]]:
    """Return what is in a folder, and when each of it was last written."""
    found = {path.name: path.lstat() for path in place.iterdir()}
    return {name: (s.st_size, s.st_mtime_ns, s.st_mode, s.st_uid) for name, s in found.items()}


@pytest.mark.parametrize("size", [256, (1 << 32) - 1])
def test_a_welcome_whose_rows_do_not_fit_its_segment_ends_in_a_clear_error(
    trap: Trap, size: int
) -> None:
    def lie(hello: Hello) -> Record:
        schema = make_schema(row_tokens=size, hidden_size=size)
        return trap.real_welcome(hello).model_copy(update={"row_schema": schema})

    trap.false.welcome = lie
    worker = trap.worker()
    with pytest.raises(LayoutMismatchError, match="different versions"):
        worker.acquire(60.0)
    worker.close()


@pytest.mark.parametrize("seconds", [5e-324, 1e-9, 1e18, 1e308])
def test_a_welcome_with_times_that_no_clock_has_is_dropped(trap: Trap, seconds: float) -> None:
    """Else a worker would beat without a pause, or wait for longer than a number can say."""

    def lie(hello: Hello) -> Record | None:
        truth = trap.real_welcome(hello)
        if trap.false.has_heard(Hello, 3):
            return truth
        return truth.model_copy(update={"heartbeat_seconds": seconds})

    trap.false.welcome = lie
    worker = trap.worker()
    assert worker.schema(60.0) == make_schema()
    wait_until(lambda: trap.false.has_heard(Heartbeat, 3), "the worker beats as it should")
    worker.close()


DROPPED = {
    "slot": lambda d, ring: {"slot": ring.num_slots},
    "far slot": lambda d, ring: {"slot": 1 << 62},
    "ring_epoch": lambda d, ring: {"ring_epoch": d.ring_epoch ^ 1},
    "session": lambda d, ring: {"session": d.session ^ 1},
    "used_tokens": lambda d, ring: {"used_tokens": make_schema().row_tokens + 1},
    "num_bytes": lambda d, ring: {"num_bytes": d.num_bytes + 1},
}  # fmt: skip
GIVEN_BACK = {
    "generation": lambda d, ring: {"generation": d.lease.generation + 1},
    "other slot": lambda d, ring: {"slot": (d.lease.slot + 1) % ring.num_slots},
    "sequence": lambda d, ring: {"sequence": d.sequence + 1},
    "token_hash": lambda d, ring: {"token_hash": d.token_hash ^ 1},
}  # fmt: skip


def changed(told: Descriptor, changes: dict[str, int], lease_id: int) -> Descriptor:
    """Return a descriptor with other values, under a lease of its own."""
    of_lease = {key: value for key, value in changes.items() if key in ("slot", "generation")}
    others = {key: value for key, value in changes.items() if key not in of_lease}
    lease = told.lease.model_copy(update={**of_lease, "lease_id": lease_id})
    return told.model_copy(update={**others, "lease": lease})


@pytest.mark.parametrize("kind", [*DROPPED, *GIVEN_BACK])
def test_a_descriptor_out_of_bounds_is_dropped_and_a_false_one_is_given_back(
    trap: Trap, kind: str
) -> None:
    trap.false.welcome = trap.real_welcome
    worker = trap.worker()
    wait_until(lambda: trap.false.has_heard(Heartbeat), "the worker is welcomed")
    session = next(r.session for r in reversed(trap.false.heard) if isinstance(r, Heartbeat))
    told = trap.told.model_copy(update={"session": session})
    changes = (DROPPED | GIVEN_BACK)[kind](told, trap.owner._segment.ref)
    trap.false.say(changed(told, changes, 1001), changed(told, {}, 1002))
    if kind in GIVEN_BACK:
        false = worker.acquire(60.0)
        assert false is not None
        assert not false.is_intact(false.read("token_ids"))
        false.nack("torn")
        wait_until(lambda: trap.false.has_heard(Nack), "the false lease is given back")
    lease = worker.acquire(60.0)
    assert lease is not None
    assert lease.descriptor.lease.lease_id == 1002
    copies = {name: lease.read(name) for name in FIELDS}
    assert lease.is_intact(copies["token_ids"])
    assert is_content(7, copies)
    lease.release()
    wait_until(lambda: trap.false.has_heard(Release), "the true lease is released")
    worker.close()


def test_broken_messages_end_no_worker(trap: Trap) -> None:
    trap.false.welcome = trap.real_welcome
    worker = trap.worker()
    wait_until(lambda: trap.false.has_heard(Heartbeat), "the worker is welcomed")

    said: Counter[str] = Counter()

    @settings(deadline=None, phases=(Phase.generate,), database=None, max_examples=150)
    @given(chance=st.randoms(use_true_random=False))
    def survives(chance: random.Random) -> None:
        raw = mutate(encode(any_record(chance.choice(WORKER_HEARS), chance)), chance)
        try:
            WORKER_DECODER.decode(raw)
        except MessageError as error:
            trap.false.say(raw)
            said[error.reason] += 1

    survives()
    wait_until(lambda: worker.refused_messages == said, "each of them is counted by its reason")
    session = next(r.session for r in reversed(trap.false.heard) if isinstance(r, Heartbeat))
    trap.false.say(trap.told.model_copy(update={"session": session}))
    lease = worker.acquire(60.0)
    assert lease is not None
    assert lease.is_intact(lease.read("token_ids"))
    worker.close()


def test_a_worker_without_an_owner_keeps_nothing_for_it() -> None:
    """Else the owner that comes late hears all the Hellos of the wait, and of hours of them."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        endpoint = Path(folder) / "false.sock"
        worker = RingConsumer(endpoint=endpoint, worker_id="early", group="main", capacity=2)
        wait_until(lambda: worker._protocol._number >= 6, "it has tried a few times")
        false = FalseOwner(endpoint)
        wait_until(lambda: false.has_heard(Hello), "it is heard")
        first = false.heard[0]
        assert isinstance(first, Hello)
        assert first.number >= 6
        worker.close()
        false.close()
