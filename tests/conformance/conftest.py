"""The rings that the suite runs over: each backing, with its readers here or in another process."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ring.backings import BACKINGS
from common.ring.owner import RingOwner
from tests.rings import (
    Reader,
    RemoteReader,
    make_groups,
    make_schema,
    make_table,
    segments_of,
    serve_readers,
)

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PLACES = [
    "memory",
    "host",
    "host, two processes",
    pytest.param("cuda_ipc", marks=NEEDS_GPU),
    pytest.param("cuda_ipc, two processes", marks=NEEDS_GPU),
]


@dataclass
class Rings:
    """Owners and readers of one test, at one path, closed at its end."""

    run: str
    endpoint: Path
    place: str
    line: Connection | None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def gpu(self) -> int | None:
        return 0 if self.place.startswith("cuda") else None

    def owner(self, *groups: str, num_slots: int = 4, schema: Any = None, settled: Any = None,
              **table: object) -> RingOwner:  # fmt: skip
        patient = {
            "lease_seconds": 60.0,
            "lease_max_seconds": 60.0,
            "session_timeout_seconds": 60.0,
        }
        owner = RingOwner(
            endpoint=self.endpoint, run=self.run, schema=schema or make_schema(),
            backing=BACKINGS[self.place.partition(",")[0]], gpu=self.gpu,
            table=make_table(num_slots=num_slots, **patient | table), groups=make_groups(*groups),
            settled=settled,
        )  # fmt: skip
        self.stack.callback(owner.close)
        return owner

    def reader(self, worker_id: str = "w", group: str = "main", **options: Any) -> Any:
        arguments, options = (self.endpoint, worker_id, group), {"gpu": self.gpu, **options}
        reader: Any = (
            RemoteReader(self.line, *arguments, **options)
            if self.line
            else Reader(*arguments, **options)
        )
        self.stack.callback(reader.close)
        return reader


@pytest.fixture(scope="module")
def other_process() -> Iterator[Connection]:
    """Lend a process in which readers live."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_readers, args=(theirs,))
    process.start()
    yield ours
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0


@contextlib.contextmanager
def rings_in(place: str, line: Connection | None = None) -> Iterator[Rings]:
    """Give a test a run of its own, and see that nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        run = f"conformance-{os.getpid()}-{os.urandom(3).hex()}"
        rings = Rings(run, Path(folder) / "target-0.sock", place, line)
        with rings.stack:
            yield rings
        assert list(Path(folder).iterdir()) == []
        assert segments_of(run) == []


@pytest.fixture(params=PLACES)
def rings(request: pytest.FixtureRequest) -> Iterator[Rings]:
    line = request.getfixturevalue("other_process") if "two" in request.param else None
    with rings_in(request.param, line) as rings:
        yield rings
