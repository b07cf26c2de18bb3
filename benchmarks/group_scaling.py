"""What do two workers of a group make of rows that are there already, against one?

    python -m benchmarks.group_scaling --config my.toml [--cases none:1 none:2 local_sgd:2 allreduce:2]
        [--seconds 60] [--rows 16] [--rounds 2] [--set ...] [--json]

A case is a group's sync and its number of workers. Rows of the config's target are captured first; then
this process owns the ring and publishes them again and again under new sequences, as fast as real worker
processes take them, each with one thread (`run.num_threads` of the config). Rows a second are counted at the
ring from the moment when every worker has trained. Cases take turns, in rounds. A case's `sync_share` is the
part of the workers' time that went into meetings, their waiting for each other included. Then one more
worker joins a synced group: `heal_seconds` went into its taking over weights and moments.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.float8_loss import captured
from benchmarks.script import positive
from common.config.loading import load
from common.contracts.sequences import ONE_RING
from common.ring.owner import RingOwner
from common.target.loading import describe_target, load_tokenizer, resolve_target_layer_ids
from common.tensors import slot_tensor
from services.target_server.assemble import make_schema, open_ring, resumable_template
from services.target_server.config import TargetServerConfig
from services.target_server.packing import PackedRow
from services.target_server.transport import choose_transport

_SMALL_FIELDS = ("token_ids", "document_ids", "position_ids", "loss_mask")
_START_SECONDS = 300.0
_HEALED = re.compile(r"healed by member \d+ to step \d+ in ([\d.]+) s")
Row = tuple[PackedRow, Tensor]


def main() -> None:
    """Capture, run every case in turn, print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument(
        "--cases", nargs="+", default=["none:1", "none:2", "local_sgd:2", "allreduce:2"]
    )
    parser.add_argument("--seconds", type=positive, default=60)
    parser.add_argument("--rows", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = load(TargetServerConfig, options.config, options.settings)
    layer_ids = resolve_target_layer_ids(server.target, describe_target(server.target).num_layers)
    rows = list(captured(server, layer_ids, options.rows))
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for case in options.cases:
            with tempfile.TemporaryDirectory() as folder:
                settings = [*options.settings, *settings_of(case, folder)]
                found.setdefault(case, []).append(
                    measure(
                        options.config, settings, rows, int(case.split(":")[1]), options.seconds
                    )
                )
    alone = statistics.median(each["rows_per_second"] for each in found[options.cases[0]])
    for case, runs in found.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        line: dict[str, Any] = {
            "case": case, **{key: round(value, 4) for key, value in medians.items()},
            "ratio": round(medians["rows_per_second"] / alone, 3),
        }  # fmt: skip
        print(json.dumps(line) if options.json else line, flush=True)


def settings_of(case: str, folder: str) -> list[str]:
    """Return the settings of a case's run."""
    sync, _ = case.split(":")
    return [
        f"run.directory={folder}/run", f"groups.main.sync={sync}", "held_out.prompts=[]",
        "training.log_steps=1", "training.checkpoint_steps=100000",
    ]  # fmt: skip


def measure(
    configs: list[Path], settings: list[str], rows: list[Row], num_workers: int, seconds: float
) -> dict[str, float]:
    """Return rows a second of all workers together, and their share of time in meetings."""
    server = load(TargetServerConfig, configs, settings)
    target, tokenizer = describe_target(server.target), load_tokenizer(server.target)
    layer_ids = resolve_target_layer_ids(server.target, target.num_layers)
    schema = make_schema(server, target, layer_ids, resumable_template(server, tokenizer))
    server.run.directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        transport = choose_transport(server.run, server.ring, None)
        owner = stack.enter_context(open_ring(server, ONE_RING, schema, transport, None))
        is_synced = server.groups["main"].sync != "none"
        log = server.run.directory / "benchmark.log"
        begin = partial(start, stack, configs, settings, log)
        if is_synced:
            begin("services.quorum_server")
        workers = [begin("services.drafter_worker") for _ in range(num_workers)]
        stop = threading.Event()
        feeder = threading.Thread(target=feed, args=(owner, rows, stop))
        feeder.start()
        stack.callback(feeder.join)
        stack.callback(stop.set)
        metrics = server.run.directory / "metrics"
        wait_for_steps(metrics, num_workers, workers)
        before, start_time, synced = num_released(owner), time.perf_counter(), synced_in(metrics)
        threading.Event().wait(seconds)
        took = time.perf_counter() - start_time
        figures = {
            "rows_per_second": (num_released(owner) - before) / took,
            "sync_share": (synced_in(metrics) - synced) / took / num_workers,
        }
        if is_synced:
            begin("services.drafter_worker")
            figures["heal_seconds"] = heal_seconds(log)
        return figures


def heal_seconds(log: Path) -> float:
    """Wait until a worker says in the log that it was healed; return how long that took."""
    deadline = time.monotonic() + _START_SECONDS
    while not (found := _HEALED.findall(log.read_text(encoding="utf-8"))):
        if time.monotonic() > deadline:
            raise SystemExit("no worker was healed; run the case by hand")
        threading.Event().wait(0.5)
    return float(found[-1])


def start(
    stack: contextlib.ExitStack, configs: list[Path], settings: list[str], log: Path, module: str
) -> "subprocess.Popen[bytes]":
    """Start a service of the run that logs to a file; it is killed when the stack closes."""
    given = [part for path in configs for part in ("--config", str(path))]
    given += [part for setting in settings for part in ("--set", setting)]
    with log.open("ab") as output:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-m", module, *given], stderr=output)
        )
    stack.callback(process.kill)
    return process


def feed(owner: RingOwner, rows: list[Row], stop: threading.Event) -> None:
    """Publish the rows again and again, under sequences that go on."""
    sequence = 0
    while not stop.is_set():
        slot = owner.loan(0.2)
        if slot is None:
            continue
        row, features = rows[sequence % len(rows)]
        for name in _SMALL_FIELDS:
            slot.field(name)[:] = memoryview(getattr(row, name)).cast("B")
        slot_tensor(owner.layout, "aux_hidden_states", slot.memory).copy_(features)
        slot.publish(
            sequence=sequence, split="train", used_tokens=row.used_tokens, documents=row.documents
        )
        sequence += 1


def num_released(owner: RingOwner) -> int:
    """Return how many rows workers have taken."""
    return sum(account.released for account in owner.report().groups)


def wait_for_steps(
    metrics: Path, num_workers: int, processes: list["subprocess.Popen[bytes]"]
) -> None:
    """Wait until each worker has made some steps."""
    deadline = time.monotonic() + _START_SECONDS
    while sum(len(lines) >= 3 for lines in read(metrics)) < num_workers:
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("a worker has ended, or makes no steps; run the case by hand")
        threading.Event().wait(0.2)


def synced_in(metrics: Path) -> float:
    """Return the seconds that all workers have spent in meetings."""
    return sum(lines[-1].get("sync_seconds", 0.0) for lines in read(metrics))


def read(metrics: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each worker's metrics that has any."""
    for path in sorted(metrics.glob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if lines:
            yield lines


if __name__ == "__main__":
    main()
