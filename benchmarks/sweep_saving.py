"""What does one stream for two drafters save against a run for each?

    python -m benchmarks.sweep_saving [--config FILE] [--conversations N] [--repeats N] [--json]

Two drafters of other block sizes train on the same rows: as two groups of one run (`together`), and in
two runs one after the other (`apart`). Each run is `ringdraft up` as users start it, without held-out
rows and without an evaluation. Drafters have the same seeds and rows both ways, so that on a CPU their
last losses must be equal. Seconds: `target` runs rows through the target, `train` from a worker's first
row to its last, `cpu` of all processes of a run, `wall` from start to end.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.script import positive, tidy_shared_memory

GROUPS = {"narrow": 4, "wide": 8}
"""Block sizes."""
SECONDS = ("target_seconds", "train_seconds", "cpu_seconds", "wall_seconds")


def run_groups(config: Path, conversations: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Train these groups in one run and return its figures."""
    settings = [
        f"data.max_conversations={conversations}", "launcher.evaluate=false", "held_out.prompts=[]",
        "control_plane.port=0", *(f"groups.{n}.drafter.block_size={GROUPS[n]}" for n in names),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "services.launcher.cli", "up", "--config", str(config)]
        for setting in (*settings, f"run.directory={run}"):
            command += ["--set", setting]
        before = _cpu_seconds()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        cpu_seconds = _cpu_seconds() - before
        line = json.loads(done.stdout.splitlines()[-1])
        target = json.loads((run / "target-0.summary.json").read_text())
        workers = [json.loads(path.read_text()) for path in (run / "workers").iterdir()]
    return {
        "target_tokens": target["captured_tokens"],
        "target_seconds": target["capture_seconds"],
        "train_seconds": max(worker["train_seconds"] for worker in workers),
        "cpu_seconds": cpu_seconds,
        "wall_seconds": line["wall_seconds"],
        "rows": line["rows_trained"],
        "losses": {worker["group"]: worker["loss"] for worker in workers},
    }


def measure(config: Path, conversations: int) -> dict[str, Any]:
    """Run both ways once."""
    together = run_groups(config, conversations, tuple(GROUPS))
    alone = [run_groups(config, conversations, (name,)) for name in GROUPS]
    apart = {key: sum(one[key] for one in alone) for key in ("target_tokens", *SECONDS)}
    return {
        "rows": together["rows"],
        "together": {key: together[key] for key in ("target_tokens", *SECONDS)},
        "apart": apart,
        "ratio": {key: apart[key] / together[key] for key in ("target_tokens", *SECONDS)},
        "losses_are_equal": together["losses"] == alone[0]["losses"] | alone[1]["losses"],
    }


def _cpu_seconds() -> float:
    """Of all children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("examples/smollm2/demo.toml"))
    parser.add_argument("--conversations", type=positive, default=100)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tidy_shared_memory()
    results = [measure(options.config, options.conversations) for _ in range(options.repeats)]
    if options.json:
        print(json.dumps(results))
        return
    print(f"rows {results[0]['rows']}, losses equal {[r['losses_are_equal'] for r in results]}")
    for key in ("target_tokens", *SECONDS):
        together, apart, ratio = (
            statistics.median(result[way][key] for result in results)
            for way in ("together", "apart", "ratio")
        )
        print(f"{key}: together {together:.1f}, apart {apart:.1f}, {ratio:.2f} times")


if __name__ == "__main__":
    main()
