"""Workers of one group on GPUs of their own: does each one more add what the first one makes?

    python -m benchmarks.topologies.four_gpus --folder DIR [--seconds 60] [--precision bf16|fp8] [--out FILE]

One drafter of the Qwen3-8B shape, `sync = "allreduce"`:

1. One target on GPU 0, and one, two and three workers on the others: `scaling` is the rate of n workers
   over n times that of one. The target has 8 of the shape's 36 layers, so that it keeps up with three.
2. Two targets and two workers.
3. Three small workers, one killed and one more started in its place: every worker logs a hash of its weights
   after each exchange, and those of one lineage must be equal.

Aim: scaling 0.95 a worker.
"""

import re
from typing import Any

from benchmarks.script import tidy_shared_memory
from benchmarks.topologies.fleet import Fleet, Machine, live, write_result
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


def start(fleet: Fleet, num_targets: int, num_workers: int, settings: tuple[str, ...] = ()) -> None:
    """Start targets on the first GPUs and workers on those behind them."""
    fleet.start("quorum_server", "quorum-server")
    for number in range(num_targets):
        fleet.start("target_server", f"target-{number}", number, settings=settings)
    for number in range(num_workers):
        fleet.start("drafter_worker", f"worker-{number}", num_targets + number, settings=settings)


def replace_one(options: Any, machine: Machine) -> dict[str, Any]:
    """Kill one of three workers, start another, and compare their weights."""
    directory, config = make_run(options, machine, "four-gpus-fault", "tiny", sync="allreduce")
    settings = ("run.log_level=DEBUG",)
    with Fleet(directory, config, machine) as fleet:
        start(fleet, 1, 3, settings)
        fleet.wait_for_steps(3, _EXCHANGES)
        fleet.kill("worker-2")
        step = max(worker["report"]["step"] for worker in live(fleet.status()["workers"]))
        fleet.wait_until(
            lambda s: min(w["report"]["step"] for w in live(s["workers"])) > step + _EXCHANGES
            and len(live(s["workers"])) == 2, "the other two go on",
        )  # fmt: skip
        fleet.start("drafter_worker", "worker-3", 3, settings=settings)
        fleet.wait_until(
            lambda _: "healed by member" in fleet.log("worker-3"), "the newcomer is healed"
        )
        healed_at = len(_WEIGHTS.findall(fleet.log("worker-3")))
        fleet.wait_until(
            lambda _: len(_WEIGHTS.findall(fleet.log("worker-3"))) > healed_at + _EXCHANGES,
            "the newcomer exchanges",
        )  # fmt: skip
        logs = [fleet.log(f"worker-{number}") for number in range(4)]
    return {
        **compare_weights(logs),
        "over": sorted(set(re.findall(r"sums over (\w+)", "".join(logs)))),
    }


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
    options = make_parser(__doc__, "four_gpus.json").parse_args()
    tidy_shared_memory()
    machine = Machine.find()
    runs = {
        f"{t}+{w}": measure(options, machine, t, w) for t, w in ((1, 1), (1, 2), (1, 3), (2, 2))
    }
    one = runs["1+1"]["trained_tokens_per_second"]
    scaling = {n: runs[f"1+{n}"]["trained_tokens_per_second"] / (n * one) for n in (2, 3)}
    result = {
        "form": machine.form(4),
        "scaling": scaling,
        "runs": runs,
        "fault": replace_one(options, machine),
    }
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
        (f"* One of three killed, one joined: {fault['lineages_compared']} states of weights compared over the "
        f"workers, {fault['lineages_that_differ']} differ; sums over {fault['over']}."),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
