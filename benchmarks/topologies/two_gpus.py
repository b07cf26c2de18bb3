"""A target on one GPU and a worker on another: is the ring as fast as a plain peer copy, and does it show?

    python -m benchmarks.topologies.two_gpus --folder DIR [--seconds 60] [--precision bf16|fp8] [--out FILE]

1. Peer copies: an owner process fills slots on GPU 0 and a worker process on GPU 1 copies them out, against a
   plain copy of as many bytes between the two in the same run. On one GPU the copy stays inside it, on a
   CPU it is a memcpy.
2. The pipeline at the Qwen3-8B shape (random weights), a minute.
3. The worker again, given its GPU by index and by UUID: either way it sees no other, the target's neither.

Aims: peer copies of the ring 0.90 of plain ones, pipeline efficiency 0.95.
"""

from typing import Any

import torch

from benchmarks.ring_limits import peer_rate
from benchmarks.ring_throughput import ROW_BYTES_A_TOKEN, make_schema, run_pass
from benchmarks.script import tidy_shared_memory
from benchmarks.topologies.fleet import Fleet, Machine, write_result
from benchmarks.topologies.plan import make_parser, make_run

_SLOT_MIB, _ROWS = 160, 256
_SMALL_SLOT_MIB, _FEW_ROWS = 16, 32
_STEPS = 20


def peer_copies(machine: Machine) -> dict[str, float]:
    """Return the ring's rate from one GPU to another, and a plain copy's."""
    slot_mib, rows = (_SLOT_MIB, _ROWS) if machine.gpus else (_SMALL_SLOT_MIB, _FEW_ROWS)
    device = torch.device("cuda", 0) if machine.gpus else torch.device("cpu")
    reader = len(machine.gpus) > 1
    schema = make_schema(slot_mib)
    num_bytes = schema.row_tokens * ROW_BYTES_A_TOKEN
    backing = "cuda_ipc" if machine.gpus else "host"
    target = torch.device("cuda", 1) if reader else device
    plain = peer_rate(num_bytes, device, target)
    ring = run_pass("read", backing, schema, rows, device, 1 if reader else None)
    plain = (plain + peer_rate(num_bytes, device, target)) / 2
    return {
        "slot_mib": num_bytes / (1 << 20),
        "ring_gbytes_per_second": ring / 1e9,
        "plain_gbytes_per_second": plain / 1e9,
        "ratio": ring / plain,
    }


def main() -> None:
    """Run all three and write the result."""
    options = make_parser(__doc__, "two_gpus.json").parse_args()
    tidy_shared_memory()
    machine = Machine.find()
    result: dict[str, Any] = {"form": machine.form(2), "peer_copies": peer_copies(machine)}
    directory, config = make_run(options, machine, "two-gpus", "qwen3-8b")
    with Fleet(directory, config, machine) as fleet:
        fleet.start("target_server", "target-0", gpu=0)
        fleet.start("drafter_worker", "worker-uuid", gpu=1)
        fleet.wait_for_steps(1, _STEPS)
        result["pipeline"] = fleet.measure(options.seconds)
        result["by_index"] = _start_again(fleet)
    write_result(
        options.out, "Two GPUs: a target on one, a worker on the other", result, _report(result)
    )


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
    peer, pipeline, again = (result[key] for key in ("peer_copies", "pipeline", "by_index"))
    (worker,), (target,) = pipeline["workers"].values(), pipeline["targets"].values()
    return [
        (
            f"* Ring {peer['ring_gbytes_per_second']:.1f} GB/s, plain copy {peer['plain_gbytes_per_second']:.1f}: "
            f"{peer['ratio']:.2f} (aim 0.90), slots of {peer['slot_mib']:.0f} MiB."
        ),
        (
            f"* Pipeline: {pipeline['trained_tokens_per_second']:,.0f} tokens a second, efficiency "
            f"{pipeline['pipeline_efficiency']:.3f} (aim 0.95); worker starved {worker['starved_share']:.1%}, "
            f"target blocked {target['blocked_share']:.1%}, recompiles {worker['recompiles']}."
        ),
        f"* Transport: {pipeline['transport']['chosen']} ({pipeline['transport']['reason']}).",
        (
            f"* By UUID the worker trained on {worker['gpu_uuid'] or 'the CPU'}, by index on "
            f"{again['gpu_uuid'] or 'the CPU'}; it sees no other GPU either way."
        ),
        f"* Memory change: {pipeline['memory_change_bytes']}.",
    ]


if __name__ == "__main__":
    main()
