"""A target on one GPU and a worker on another: is the ring as fast as a plain peer copy, and does it show?

    python -m benchmarks.topologies.two_gpus --folder DIR [--seconds 60] [--precision bf16|fp8] [--out FILE]

1. Peer copies: an owner process on GPU 0 publishes slots and a worker process on GPU 1 stages them, against a
   plain copy of as many bytes between the two in the same run: the copies alone by the GPU's clock, and by
   wall-clock with every message, for rows of the Qwen3-8B shape and for four times as long ones. On one
   GPU the copy stays inside it, on a CPU it is a memcpy.
2. The pipeline at the Qwen3-8B shape (random weights), a minute.
3. The worker again, given its GPU by index and by UUID: either way it sees no other, the target's neither.

Aims: peer copies of the ring 0.90 of plain ones, pipeline efficiency 0.95.
"""

from typing import Any

import torch

from benchmarks.ring_limits import peer_copy_rate, peer_rate
from benchmarks.ring_throughput import ROW_BYTES_A_TOKEN, make_schema, run_pass
from benchmarks.script import tidy_shared_memory
from benchmarks.topologies.fleet import Fleet, Machine, write_result
from benchmarks.topologies.plan import make_parser, make_run

_SLOTS_MIB, _ROWS = (160, 640), 256
_SMALL_SLOTS_MIB, _FEW_ROWS = (16,), 32
_STEPS = 20


def peer_copies(machine: Machine) -> list[dict[str, float]]:
    """Return the ring's rates from one GPU to another beside plain copies, for each size of slot."""
    if not machine.gpus:
        return [_peer_copies(mib, _FEW_ROWS, machine) for mib in _SMALL_SLOTS_MIB]
    return [_peer_copies(mib, _ROWS, machine) for mib in _SLOTS_MIB]


def _peer_copies(slot_mib: int, rows: int, machine: Machine) -> dict[str, float]:
    owner = torch.device("cuda", 0) if machine.gpus else torch.device("cpu")
    reader = torch.device("cuda", 1) if len(machine.gpus) > 1 else owner
    schema = make_schema(slot_mib)
    num_bytes = schema.row_tokens * ROW_BYTES_A_TOKEN
    backing = "cuda_ipc" if machine.gpus else "host"
    plain = peer_rate(num_bytes, owner, reader)
    ring = run_pass("read", backing, schema, rows, owner, reader.index)
    # A CPU has no clock of its own: its copies are those with messages.
    copies = peer_copy_rate(num_bytes, 0, reader.index) if machine.gpus else ring
    plain = (plain + peer_rate(num_bytes, owner, reader)) / 2
    return {
        "slot_mib": num_bytes / (1 << 20),
        "plain_gbytes_per_second": plain / 1e9,
        "copy_gbytes_per_second": copies / 1e9,
        "copy_ratio": copies / plain,
        "ring_gbytes_per_second": ring / 1e9,
        "ring_ratio": ring / plain,
    }


def main() -> None:
    """Run all three; each result is written as it comes."""
    options = make_parser(__doc__, "two_gpus.json").parse_args()
    tidy_shared_memory()
    machine = Machine.find()
    result: dict[str, Any] = {"form": machine.form(2)}

    def add(name: str, figures: Any) -> None:
        result[name] = figures
        title = "Two GPUs: a target on one, a worker on the other"
        write_result(options.out, title, result, _report(result))

    add("peer_copies", peer_copies(machine))
    directory, config = make_run(options, machine, "two-gpus", "qwen3-8b")
    with Fleet(directory, config, machine) as fleet:
        fleet.start("target_server", "target-0", gpu=0)
        fleet.start("drafter_worker", "worker-uuid", gpu=1)
        fleet.wait_for_steps(1, _STEPS)
        add("pipeline", fleet.measure(options.seconds))
        add("by_index", _start_again(fleet))


def _start_again(fleet: Fleet) -> dict[str, Any]:
    """End the worker and start one that is told its GPU by index; return where it trains."""
    step = fleet.status()["workers"][0]["report"]["step"]
    fleet.kill("worker-uuid")
    fleet.start("drafter_worker", "worker-index", gpu=1, naming="index")
    status = fleet.wait_until(
        lambda s: any(w["condition"] == "ok" and (w["report"] or {}).get("trained_rows", 0) > _STEPS
                      and w["pid"] == fleet.pid("worker-index") for w in s["workers"]),
        f"a worker by index trains, behind step {step}",
    )  # fmt: skip
    (worker,) = (w for w in status["workers"] if w["pid"] == fleet.pid("worker-index"))
    return {"gpu_uuid": worker["report"]["gpu_uuid"], "transport": status["transport"]}


def _report(result: dict[str, Any]) -> list[str]:
    lines = [
        f"* Slots of {copies['slot_mib']:.0f} MiB: plain copies {copies['plain_gbytes_per_second']:.1f} GB/s; the "
        f"ring's {copies['copy_gbytes_per_second']:.1f} ({copies['copy_ratio']:.2f}, aim 0.90), with every "
        f"message {copies['ring_gbytes_per_second']:.1f} ({copies['ring_ratio']:.2f})."
        for copies in result["peer_copies"]
    ]
    if pipeline := result.get("pipeline"):
        (worker,), (target,) = pipeline["workers"].values(), pipeline["targets"].values()
        lines += [
            (
                f"* Pipeline: {pipeline['trained_tokens_per_second']:,.0f} tokens a second, efficiency "
                f"{pipeline['pipeline_efficiency']:.3f} (aim 0.95); worker starved {worker['starved_share']:.1%}, "
                f"target blocked {target['blocked_share']:.1%}, step {worker['step_seconds'] * 1e3:.1f} ms, "
                f"recompiles {worker['recompiles']}."
            ),
            f"* Transport: {pipeline['transport']['chosen']} ({pipeline['transport']['reason']}).",
            f"* Memory change: {pipeline['memory_change_bytes']}.",
        ]
        if again := result.get("by_index"):
            lines.append(
                f"* By UUID the worker trained on {worker['gpu_uuid'] or 'the CPU'}, by index on "
                f"{again['gpu_uuid'] or 'the CPU'}; it sees no other GPU either way."
            )
    return lines


if __name__ == "__main__":
    main()
