"""What does one stream for two drafters save against a run for each?

    python -m benchmarks.sweep_saving [--config FILE] [--conversations N] [--repeats N] [--json]

Two drafters of other block sizes train on the same rows: as two groups of one run (`together`), and in
two runs one after the other (`apart`). Each run is `ringdraft up` as users start it, without held-out
rows and without an evaluation. Drafters have the same seeds and rows both ways, so that on a CPU their
last losses must be equal. Seconds: `target_cpu` and `cpu` of cores, by the target and by all processes of
a run; `train` from a worker's first row to its last; `wall` from start to end. The last two are of use on
a machine that does nothing else.
"""

import argparse
import contextlib
import json
import os
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
_LOOK_SECONDS = 0.2
SECONDS = ("target_cpu_seconds", "train_seconds", "cpu_seconds", "wall_seconds")


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
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        target_cpu_seconds = _watch_target(launcher, str(run))
        out, _ = launcher.communicate()
        if launcher.returncode:
            raise SystemExit(f"{names}: exit code {launcher.returncode}")
        cpu_seconds = _cpu_seconds() - before
        line = json.loads(out.splitlines()[-1])
        target = json.loads((run / "target-0.summary.json").read_text())
        workers = [json.loads(path.read_text()) for path in (run / "workers").iterdir()]
    return {
        "target_tokens": target["captured_tokens"],
        "target_cpu_seconds": target_cpu_seconds,
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


def _watch_target(launcher: "subprocess.Popen[str]", directory: str) -> float:
    """Return the seconds of cores that the run's target server has used, as last seen."""
    seconds, pid = 0.0, None
    while True:
        try:
            launcher.wait(_LOOK_SECONDS)
            return seconds
        except subprocess.TimeoutExpired:
            pid = pid or _find_target(directory)
        if pid is not None:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _find_target(directory: str) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text().split("\0")
            is_service = "services.target_server" in command and "--dry-run" not in command
            if is_service and f"run.directory={directory}" in command:
                return int(path.parent.name)
    return None


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
