"""What does a row cost its owner, all included, in time of one core?

    python -m benchmarks.owner_cost [--rows 20000] [--cases 8:1 8:4 4096:1 4096:4] [--json]

CPU time of the owner's process (every thread, ZeroMQ's own as well) over many tiny rows: loan,
header, publish, descriptor, release, credit, heartbeats and pulses. What the owner spends on a
second in which no row moves is measured apart, with the same workers connected. So is the least that
a row could cost: one message sent and one received by a process with a bare ZeroMQ ROUTER.

The cases publish rows one behind the other, as fast as the workers take them. A real target makes one
in tens of milliseconds, and by then the processor's caches have forgotten the owner: `paced_us_a_row` is
the cost of such a row beyond what the time between rows costs anyhow.
"""

import argparse
import json
import time

from benchmarks.announce_latency import DESCRIPTOR_BYTES, echo, round_trip
from benchmarks.script import positive, tidy_shared_memory
from benchmarks.tiny_ring import pause, publish_row, tiny_ring
from common.ring.owner import RingOwner

_WARM_UP = 1000
_IDLE_SECONDS = 3.0
_PACED_ROWS = 100
_PACE_SECONDS = 0.03
CASES = ("8:1", "8:4", "4096:1", "4096:4")
"""Slots and workers."""


def measure(num_slots: int, num_workers: int, num_rows: int) -> dict[str, float]:
    """Return the owner's cost of a row and of an idle second, in microseconds of one core."""
    with tiny_ring(num_slots, num_workers, owner_type=RingOwner) as (owner, _):
        for sequence in range(_WARM_UP):
            publish_row(owner, sequence)
        wait_for_releases(owner, _WARM_UP)
        start, cpu_start = time.perf_counter(), time.process_time()
        for sequence in range(_WARM_UP, _WARM_UP + num_rows):
            publish_row(owner, sequence)
        wait_for_releases(owner, _WARM_UP + num_rows)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        cpu_start = time.process_time()
        pause(_IDLE_SECONDS)
        idle = (time.process_time() - cpu_start) / _IDLE_SECONDS
        paced = paced_cost(owner, _WARM_UP + num_rows, idle)
        owner.end(_WARM_UP + num_rows + _PACED_ROWS - 1)
    return {
        "slots": num_slots,
        "workers": num_workers,
        "rows": num_rows,
        "owner_us_a_row": round(cpu / num_rows * 1e6, 1),
        "rows_per_second": round(num_rows / seconds),
        "idle_us_a_second": round(idle * 1e6),
        "paced_us_a_row": round(paced * 1e6, 1),
    }


def paced_cost(owner: RingOwner, first: int, idle: float) -> float:
    """Return a row's seconds of one core where rows have time between them.

    Args:
        idle: seconds of one core that a second without rows costs.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    for sequence in range(first, first + _PACED_ROWS):
        publish_row(owner, sequence)
        pause(_PACE_SECONDS)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return (cpu - idle * seconds) / _PACED_ROWS


def bare_cost(num_trips: int) -> float:
    """Return what a message there and back costs a process with a bare ROUTER, in microseconds."""
    message = bytes(DESCRIPTOR_BYTES)
    with echo() as router:
        for _ in range(_WARM_UP):
            round_trip(router, message)
        start = time.process_time()
        for _ in range(num_trips):
            round_trip(router, message)
        return round((time.process_time() - start) / num_trips * 1e6, 1)


def wait_for_releases(owner: RingOwner, num_rows: int) -> None:
    """Wait until every row is released; a report walks every slot, so ask seldom."""
    while owner.report().groups[0].released < num_rows:
        pause(0.25)


def main() -> None:
    """Run the benchmark: one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=positive, default=20_000)
    parser.add_argument("--cases", nargs="+", default=CASES, help="slots:workers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tidy_shared_memory()
    cases = []
    for case in options.cases:
        num_slots, num_workers = map(int, case.split(":"))
        cases.append(measure(num_slots, num_workers, options.rows))
    result = {
        "owner_us_a_row": max(case["owner_us_a_row"] for case in cases),
        "zmq_us_a_round_trip": bare_cost(options.rows),
        "cases": cases,
    }
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
