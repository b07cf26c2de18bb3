"""How long from a row's announcement until a worker holds its lease, against a bare round trip?

    python -m benchmarks.announce_latency [--rows 4000] [--json]

One row at a time in an otherwise idle ring of two processes. The clock starts when the owner goes to
encode and send the descriptor, and stops when the worker's calling thread has the lease from
`acquire` and has compared header and descriptor; `publish_p50_us` starts with the call of `publish`,
so it has the hash of the tokens, the header and the transition in it. The limit is the round trip of
a message of a descriptor's size between a bare ZeroMQ ROUTER and a DEALER of two processes over ipc,
in the same run: blocks of rows and of round trips take turns, so that whatever else loads the
machine loads both, and the same pause is before each.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

import zmq

from benchmarks.script import positive, tidy_shared_memory
from benchmarks.tiny_ring import pause, read_moment, tell_moment, tiny_ring
from common.ring.owner import RingOwner

DESCRIPTOR_BYTES = 180
_BLOCK = 200
_WARM_UP = 200


@contextlib.contextmanager
def echo() -> Iterator["zmq.Socket[bytes]"]:
    """Start a process that sends every message back; lend the ROUTER that it is connected to."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{Path(folder) / 'echo.sock'}"
        with context.socket(zmq.ROUTER) as router:
            router.bind(address)
            command = [sys.executable, "-m", __spec__.name, "--echo", address]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                read_moment(process)
                router.recv_multipart()
                yield router
                process.kill()


def serve_echo(address: str) -> None:
    """Send every message back, until killed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"echo")
        socket.connect(address)
        tell_moment()
        socket.send(b"")
        while True:
            socket.send(socket.recv())


def round_trip(router: "zmq.Socket[bytes]", message: bytes) -> float:
    """Return the microseconds of one message there and back."""
    start = time.perf_counter_ns()
    router.send_multipart([b"echo", message])
    router.recv_multipart()
    return (time.perf_counter_ns() - start) / 1000


class TimedOwner(RingOwner):
    """An owner that knows when it first sent something since `sent_at` was 0."""

    sent_at = 0

    def _send_all(self, socket: "zmq.Socket[bytes]") -> None:
        if self._protocol.outbox and not self.sent_at:
            self.sent_at = time.perf_counter_ns()
        super()._send_all(socket)


def announce(
    owner: TimedOwner, worker: "subprocess.Popen[bytes]", sequence: int
) -> tuple[float, float]:
    """Return the microseconds from sending, and from `publish`, to the validated lease."""
    slot = owner.loan(60.0)
    if slot is None:
        raise SystemExit("the ring stayed full for a minute")
    owner.sent_at = 0
    start = time.perf_counter_ns()
    slot.publish(sequence=sequence, split="train", used_tokens=1, documents=())
    validated_at = read_moment(worker)
    return (validated_at - owner.sent_at) / 1000, (validated_at - start) / 1000


def measure(num_rows: int, pause_seconds: float) -> dict[str, float]:
    """Return the percentiles of both, and the ratio of the medians."""
    rows: list[tuple[float, float]] = []
    trips: list[float] = []
    message = bytes(DESCRIPTOR_BYTES)
    ring = tiny_ring(8, 1, owner_type=TimedOwner, tells_moments=True)
    with echo() as router, ring as (owner, workers):
        for sequence in range(_WARM_UP):
            announce(owner, workers[0], sequence)
            round_trip(router, message)
        while len(rows) < num_rows:
            for _ in range(_BLOCK):
                pause(pause_seconds)
                rows.append(announce(owner, workers[0], _WARM_UP + len(rows)))
            for _ in range(_BLOCK):
                pause(pause_seconds)
                trips.append(round_trip(router, message))
        owner.end(_WARM_UP + len(rows) - 1)
    sent, published = (quantiles(column, n=100) for column in zip(*rows, strict=True))
    trip = quantiles(trips, n=100)
    return {
        "rows": len(rows),
        "p50_us": round(sent[49], 1),
        "p99_us": round(sent[98], 1),
        "publish_p50_us": round(published[49], 1),
        "zmq_round_trip_p50_us": round(trip[49], 1),
        "zmq_round_trip_p99_us": round(trip[98], 1),
        "ratio": round(sent[49] / trip[49], 3),
    }


def main() -> None:
    """Run the benchmark, or the process that its round trips go to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=positive, default=4000)
    parser.add_argument("--pause-us", type=float, default=300.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        serve_echo(options.echo)
        return
    tidy_shared_memory()
    result = measure(options.rows, options.pause_us / 1e6)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
