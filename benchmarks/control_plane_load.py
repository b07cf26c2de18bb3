"""Does the control plane keep up with 64 workers, and stay answerable meanwhile?

    python -m benchmarks.control_plane_load [--workers 64] [--seconds 20] [--beats 400] [--json]

A control plane in a process of its own; a target and `--workers` workers, simulated by full heartbeats
over real sockets from another process, `--beats` a second in all; scrapers on /metrics, /status and
/healthz, each in a thread, a request every 50 ms, and four event streams, as four open pages would have.

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
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import zmq

from benchmarks.script import positive
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


def scrape(url: str, route: str, stop: threading.Event, seconds: list[float]) -> None:
    """Ask for a route again and again, and note how long each answer took."""
    with httpx.Client(base_url=url, timeout=30) as http:
        while not stop.wait(_SCRAPE_SECONDS):
            began_at = time.perf_counter()
            http.get(route).raise_for_status()
            seconds.append(time.perf_counter() - began_at)


def watch(url: str, stop: threading.Event) -> None:
    """Read the event stream, as an open page does."""
    with httpx.Client(base_url=url, timeout=30) as http, http.stream("GET", "/events") as events:
        for _ in events.iter_lines():
            if stop.is_set():
                return


def percentile(values: list[float], share: float) -> float:
    """Return a latency in milliseconds that `share` of them do not exceed."""
    return round(1000 * sorted(values)[math.ceil(share * len(values)) - 1], 2)


def measure(num_workers: int, seconds: float, rate: float) -> dict[str, object]:
    """Run the load and return the figures."""
    with tempfile.TemporaryDirectory(prefix="ringdraft-bench-") as name:
        process, url, start_seconds = start(Path(name))
        try:
            results = Path(name) / "simulated.json"
            arguments = (name, num_workers, rate, seconds, str(results))
            load = multiprocessing.get_context("spawn").Process(target=simulate, args=arguments)
            load.start()
            latencies = _scrape_until(load.join, url)
            cpu = _cpu_seconds(process.pid)
            refused = httpx.get(f"{url}/status").json()["refused_messages"]
            outcome = json.loads(results.read_text(encoding="utf-8"))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    return {
        "seconds_to_serve": round(start_seconds, 3),
        "workers": num_workers,
        **outcome,
        "lost": outcome["sent"] - outcome["answered"],
        "refused": refused,
        "beats_a_minute": round(60 * outcome["sent"] / outcome["seconds"]),
        "control_plane_cores": round(cpu / outcome["seconds"], 3),
        **{
            f"{route} {label}": percentile(latencies[route], share)
            for route in _ROUTES
            for label, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
        },
        "requests": {route: len(latencies[route]) for route in _ROUTES},
    }


def _scrape_until(wait: Callable[[], None], url: str) -> dict[str, list[float]]:
    stop = threading.Event()
    latencies: dict[str, list[float]] = {route: [] for route in _ROUTES}
    threads = [
        threading.Thread(target=scrape, args=(url, route, stop, latencies[route]))
        for route in _ROUTES
    ]
    threads += [threading.Thread(target=watch, args=(url, stop)) for _ in range(_PAGES)]
    for thread in threads:
        thread.start()
    wait()
    stop.set()
    for thread in threads:
        thread.join()
    return latencies


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
