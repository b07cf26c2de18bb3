"""Workers of one group on GPUs of their own: does each one more add what the first one makes?

    python -m benchmarks.topologies.four_gpus --folder DIR [--seconds 60] [--precision bf16|fp8] [--out FILE]
        [--cases 1+1 1+2 1+3 2+2]

One drafter of the Qwen3-8B shape, `sync = "allreduce"`:

1. One target on GPU 0, and one, two and three workers on the others: `scaling` is the rate of n workers
   over n times that of one. The target has 8 of the shape's 36 layers, so that it keeps up with three.
2. Two targets and two workers.
3. Three small workers, one killed and one more started in its place: every worker logs a hash of its weights
   after each exchange, and those of one lineage must be equal. With fewer than four GPUs there are two.

Aim: scaling 0.95 a worker.
"""

import re
from functools import partial
from typing import Any

from benchmarks.script import tidy_shared_memory
from benchmarks.topologies.fleet import Fleet, Machine, write_result
from benchmarks.topologies.plan import make_parser, make_run

_STEPS = 15
_EXCHANGES = 10
_WEIGHTS = re.compile(r'weights \{.*"lineage": (\d+).*"digest": "([0-9a-f]+)"')


def measure(options: Any, machine: Machine, num_targets: int, num_workers: int) -> dict[str, Any]:
    """Return the figures of so many targets and workers, each on its own GPU."""
    name = f"four-gpus-{num_targets}-{num_workers}"
    directory, config = make_run(
        options, machine, name, "qwen3-8b-shallow", num_targets=num_targets, sync="allreduce"
    )
    with Fleet(directory, config, machine) as fleet:
        start(fleet, num_targets, num_workers)
        fleet.wait_for_steps(num_workers, _STEPS)
        return fleet.measure(options.seconds)


def start(fleet: Fleet, num_targets: int, num_workers: int) -> None:
    """Start targets on the first GPUs and workers on those behind them."""
    fleet.start("quorum_server", "quorum-server")
    for number in range(num_targets):
        fleet.start("target_server", f"target-{number}", number)
    for number in range(num_workers):
        fleet.start("drafter_worker", f"worker-{number}", num_targets + number)


def replace_one(options: Any, machine: Machine) -> dict[str, Any]:
    """Kill one of several workers, start another, and compare their weights."""
    directory, config = make_run(options, machine, "four-gpus-fault", "tiny", sync="allreduce")
    settings = ("run.log_level=DEBUG",)
    # From the last GPU on, so that each has its own also where the target has none for itself.
    gpus = [-1, -2] if 0 < len(machine.gpus) < 4 else [-1, -2, -3]
    with Fleet(directory, config, machine) as fleet:
        fleet.start("quorum_server", "quorum-server")
        fleet.start("target_server", "target-0")
        for number, gpu in enumerate(gpus):
            fleet.start("drafter_worker", f"worker-{number}", gpu, settings=settings)
        fleet.wait_for_steps(len(gpus), _EXCHANGES)
        fleet.kill("worker-0")
        exchanges = partial(num_exchanges, fleet)
        count = exchanges("worker-1")
        fleet.wait_until(lambda _: exchanges("worker-1") > count + _EXCHANGES, "the others go on")
        fleet.start("drafter_worker", "newcomer", gpus[0], settings=settings)
        fleet.wait_until(
            lambda _: "healed by member" in fleet.log("newcomer"), "the newcomer is healed"
        )
        count = exchanges("newcomer")
        fleet.wait_until(
            lambda _: exchanges("newcomer") > count + _EXCHANGES, "the newcomer exchanges"
        )
        names = ["newcomer", *(f"worker-{number}" for number in range(len(gpus)))]
        logs = [fleet.log(name) for name in names]
    ways = sorted(set(re.findall(r"sums over (\w+)", "".join(logs))))
    return {"workers": len(gpus), **compare_weights(logs), "sums_over": ways}


def num_exchanges(fleet: Fleet, name: str) -> int:
    """Return how many exchanges a worker has logged."""
    return len(_WEIGHTS.findall(fleet.log(name)))


def compare_weights(logs: list[str]) -> dict[str, Any]:
    """Return how many lineages two or more workers had, and in how many of them weights differed."""
    digests: dict[str, list[str]] = {}
    for log in logs:
        for lineage, digest in dict(_WEIGHTS.findall(log)).items():
            digests.setdefault(lineage, []).append(digest)
    shared = {lineage: found for lineage, found in digests.items() if len(found) > 1}
    return {
        "lineages_compared": len(shared),
        "lineages_that_differ": sum(len(set(found)) > 1 for found in shared.values()),
    }


def main() -> None:
    """Run all and write the result."""
    parser = make_parser(__doc__, "four_gpus.json")
    parser.add_argument(
        "--cases", nargs="*", default=["1+1", "1+2", "1+3", "2+2"], help="targets + workers"
    )
    options = parser.parse_args()
    tidy_shared_memory()
    machine = Machine.find()
    runs = {case: measure(options, machine, *map(int, case.split("+"))) for case in options.cases}
    rates = {case: run["trained_tokens_per_second"] for case, run in runs.items()}
    scaling = {
        n: rates[f"1+{n}"] / (n * rates["1+1"]) for n in (2, 3) if {"1+1", f"1+{n}"} <= set(rates)
    }
    result = {
        "form": machine.form(4), "scaling": scaling, "runs": runs, "fault": replace_one(options, machine)
    }  # fmt: skip
    write_result(options.out, "Four GPUs: workers of one group", result, _report(result))


def _report(result: dict[str, Any]) -> list[str]:
    lines = [
        "| targets + workers | tokens/s | efficiency | starved | in meetings | blocked |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in result["runs"].items():
        workers, targets = run["workers"].values(), run["targets"].values()
        starved, meetings = (
            sum(w[key] for w in workers) / len(workers) for key in ("starved_share", "sync_share")
        )
        blocked = sum(t["blocked_share"] for t in targets) / len(targets)
        lines.append(
            f"| {name} | {run['trained_tokens_per_second']:,.0f} | {run['pipeline_efficiency']:.3f} "
            f"| {starved:.1%} | {meetings:.1%} | {blocked:.1%} |"
        )
    scaling = ", ".join(
        f"{value:.2f} a worker with {number}" for number, value in result["scaling"].items()
    )
    fault = result["fault"]
    return [
        *lines, "", f"* Scaling: {scaling} (aim 0.95).",
        (f"* One of {fault['workers']} killed, one joined: {fault['lineages_compared']} states of weights compared over the "
        f"workers, {fault['lineages_that_differ']} differ; sums over {' and '.join(fault['sums_over']) or 'Gloo'}."),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
