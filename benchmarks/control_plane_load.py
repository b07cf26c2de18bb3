"""Does the control plane keep up with 64 workers, and stay answerable meanwhile?

    python -m benchmarks.control_plane_load [--workers 64] [--seconds 20] [--beats 400] [--json]

A control plane in a process of its own; a target and `--workers` workers, simulated by full heartbeats
over real sockets from another process, `--beats` a second in all; scrapers on /metrics, /status and
/healthz, each in a process, a request every 50 ms, and four event streams, as four open pages would have.

Lost heartbeats are those that were sent and neither counted by the registry (each session's last number
is in its reply) nor answered. Latencies are of the scraper, connection kept open.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
import zmq

from benchmarks.script import positive
from benchmarks.tiny_ring import pause
from common.contracts.codec import encode
from common.contracts.control_messages import SERVICE_DECODER, ServiceHeartbeat
from services.control_plane.examples import example_heartbeats

_RUN = "qwen3-4b"
_SCRAPE_SECONDS = 0.05
_PAGES = 4
_ROUTES = ("/healthz", "/metrics", "/status")


def start(directory: Path) -> tuple["subprocess.Popen[str]", str, float]:
    """Start a control plane; return it, its address, and the seconds until it served."""
    began_at = time.monotonic()
    settings = (f"run.name={_RUN}", f"run.directory={directory}", "control_plane.port=0")
    arguments = [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.control_plane", *arguments],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on (http://\S+)", line):
            httpx.get(f"{found[1]}/healthz").raise_for_status()
            return process, found[1], time.monotonic() - began_at
    raise RuntimeError(f"the control plane ended with exit code {process.wait()}")


def simulate(directory: str, num_workers: int, rate: float, seconds: float, results: str) -> None:
    """Send heartbeats of one target and many workers, evenly over the time; write down the counts."""
    context = zmq.Context()
    beats = example_heartbeats(num_workers)
    lines = [_connect(context, directory) for _ in beats]
    poller = zmq.Poller()
    for line in lines:
        poller.register(line, zmq.POLLIN)
    answered = {beat.session: 0 for beat in beats}
    num_sent = num_answers = 0
    began_at = time.monotonic()
    while (elapsed := time.monotonic() - began_at) < seconds:
        while num_sent < elapsed * rate:
            turn, which = divmod(num_sent, len(beats))
            lines[which].send(encode(_next(beats[which], turn + 1)))
            num_sent += 1
        num_answers += _receive(poller, answered, 2)
    while num_answers < num_sent and (got := _receive(poller, answered, 2000)):
        num_answers += got
    last = [math.ceil((num_sent - which) / len(beats)) for which in range(len(beats))]
    is_current = all(answered[beat.session] == last[i] for i, beat in enumerate(beats))
    outcome = {
        "sent": num_sent, "answered": num_answers, "seconds": round(elapsed, 3),
        "every_last_one_answered": is_current,
    }  # fmt: skip
    Path(results).write_text(json.dumps(outcome), encoding="utf-8")
    for line in lines:
        line.close(linger=0)
    context.term()


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", directory: str) -> "zmq.Socket[bytes]":
    line = context.socket(zmq.DEALER)
    line.connect(f"ipc://{directory}/control.sock")
    return line


def _next(beat: ServiceHeartbeat, number: int) -> ServiceHeartbeat:
    return beat.model_copy(update={"number": number, "progress": number})


def _receive(poller: zmq.Poller, answered: dict[int, int], timeout_ms: int) -> int:
    num_answers = 0
    for line, _ in poller.poll(timeout_ms):
        reply = SERVICE_DECODER.decode(line.recv())
        answered[reply.session] = max(answered[reply.session], reply.number)
        num_answers += 1
    return num_answers


def scrape(address: str, route: str, seconds: float, results: str) -> None:
    """Ask for a route again and again, and write down how long each answer took, in seconds."""
    http = HTTPConnection(address, timeout=30)
    deadline = time.monotonic() + seconds
    taken = []
    while time.monotonic() < deadline:
        began_at = time.perf_counter()
        http.request("GET", route)
        answer = http.getresponse()
        answer.read()
        taken.append(time.perf_counter() - began_at)
        assert answer.status == 200, answer.status
        pause(_SCRAPE_SECONDS)
    http.close()
    Path(results).write_text(json.dumps(taken), encoding="utf-8")


def watch(address: str, seconds: float) -> None:
    """Read event streams, as open pages do, and look at nothing."""
    lines = [HTTPConnection(address, timeout=30) for _ in range(_PAGES)]
    for line in lines:
        line.request("GET", "/events")
    answers = [line.getresponse() for line in lines]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for answer in answers:
            answer.read1(1 << 20)
    for line in lines:
        line.close()


def percentile(values: list[float], share: float) -> float:
    """Return a latency in milliseconds that `share` of them do not exceed."""
    return round(1000 * sorted(values)[math.ceil(share * len(values)) - 1], 2)


def measure(num_workers: int, seconds: float, rate: float) -> dict[str, object]:
    """Run the load and return the figures."""
    with tempfile.TemporaryDirectory(prefix="ringdraft-bench-") as name:
        directory = Path(name)
        process, url, start_seconds = start(directory)
        try:
            run_load(directory, url.removeprefix("http://"), num_workers, rate, seconds)
            cpu = _cpu_seconds(process.pid)
            refused = httpx.get(f"{url}/status").json()["refused_messages"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        outcome = json.loads(_results(directory, "beats").read_text(encoding="utf-8"))
        taken = {
            route: json.loads(_results(directory, route[1:]).read_text(encoding="utf-8"))
            for route in _ROUTES
        }
    return {
        "seconds_to_serve": round(start_seconds, 3),
        "workers": num_workers,
        **outcome,
        "lost": outcome["sent"] - outcome["answered"],
        "refused": refused,
        "beats_a_minute": round(60 * outcome["sent"] / outcome["seconds"]),
        "control_plane_cores": round(cpu / outcome["seconds"], 3),
        "load_average": os.getloadavg()[0],
        **{
            f"{route} {label}": percentile(taken[route], share)
            for route in _ROUTES
            for label, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
        },
        "requests": {route: len(taken[route]) for route in _ROUTES},
    }


def run_load(directory: Path, address: str, num_workers: int, rate: float, seconds: float) -> None:
    """Run everyone who asks something of the control plane, each in a process, to the end."""
    spawn = multiprocessing.get_context("spawn").Process
    beats = (str(directory), num_workers, rate, seconds, str(_results(directory, "beats")))
    clients = [spawn(target=simulate, args=beats), spawn(target=watch, args=(address, seconds))]
    clients += [
        spawn(target=scrape, args=(address, route, seconds, str(_results(directory, route[1:]))))
        for route in _ROUTES
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
        assert client.exitcode == 0, client.exitcode


def _results(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=positive, default=64)
    parser.add_argument("--seconds", type=positive, default=20)
    parser.add_argument("--beats", type=positive, default=400, help="a second, of all together")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.workers, options.seconds, options.beats)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
