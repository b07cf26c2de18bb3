"""Five targets and three workers: how many tokens a second, for how long, with what left waiting?

    python -m benchmarks.topologies.eight_gpus --folder DIR [--seconds 300] [--shapes qwen3-8b 27b-like]
        [--targets 5] [--workers 3] [--sync allreduce] [--precision bf16|fp8] [--out FILE]

Random weights at the Qwen3-8B shape and at a 27B-like one (hidden 5120, 64 layers, vocabulary 248,320),
each sustained for `--seconds` behind the first steps. Aims: 20,000 tokens a second at the 27B-like shape,
pipeline efficiency 0.95, no memory taken and nothing compiled again meanwhile.
"""

from typing import Any

from benchmarks.script import positive, tidy_shared_memory
from benchmarks.topologies.fleet import Fleet, Machine, write_result
from benchmarks.topologies.four_gpus import start
from benchmarks.topologies.plan import make_parser, make_run

_STEPS = 15


def main() -> None:
    """Run each shape and write the result."""
    parser = make_parser(__doc__, "eight_gpus.json")
    parser.set_defaults(seconds=300)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b", "27b-like"])
    parser.add_argument("--targets", type=positive, default=5)
    parser.add_argument("--workers", type=positive, default=3)
    parser.add_argument("--sync", choices=("none", "allreduce", "local_sgd"), default="allreduce")
    options = parser.parse_args()
    tidy_shared_memory()
    machine = Machine.find()
    runs = {shape: measure(options, machine, shape) for shape in options.shapes}
    result = {
        "form": machine.form(options.targets + options.workers),
        "sync": options.sync,
        "runs": runs,
    }
    title = f"{options.targets} targets and {options.workers} workers"
    write_result(options.out, title, result, _report(result))


def measure(options: Any, machine: Machine, shape: str) -> dict[str, Any]:
    """Return the figures of one shape."""
    directory, config = make_run(
        options,
        machine,
        f"eight-gpus-{shape}",
        shape,
        num_targets=options.targets,
        sync=options.sync,
    )
    with Fleet(directory, config, machine) as fleet:
        start(fleet, options.targets, options.workers)
        fleet.wait_for_steps(options.workers, _STEPS)
        return fleet.measure(options.seconds)


def _report(result: dict[str, Any]) -> list[str]:
    lines = []
    for shape, run in result["runs"].items():
        workers, targets = run["workers"].values(), run["targets"].values()
        starved, blocked = ([f"{one[key]:.1%}" for one in found] for found, key in
                            ((workers, "starved_share"), (targets, "blocked_share")))  # fmt: skip
        lines += [
            (
                f"* {shape}: {run['trained_tokens_per_second']:,.0f} tokens a second over {run['seconds']:.0f} s, "
                f"efficiency {run['pipeline_efficiency']:.3f}; starved {', '.join(starved)}; blocked "
                f"{', '.join(blocked)}; recompiles {sum(worker['recompiles'] for worker in workers)}."
            ),
            f"  Memory change in bytes: {run['memory_change_bytes']}.",
        ]
    return [
        *lines,
        "",
        f"Aims: 20,000 tokens a second at the 27B-like shape, 0.95. sync = {result['sync']}.",
    ]


if __name__ == "__main__":
    main()
