"""The config of a topology's run, and the options that its scripts share."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.script import positive
from benchmarks.topologies.fleet import Machine
from benchmarks.topologies.random_target import SHAPES, TargetShape, write_target

_CONFIG = """
[run]
name = "{name}"
directory = "{directory}"
device = "{device}"
num_threads = 1
[target]
model = "{model}"
dtype = "{dtype}"
replicas = {num_targets}
[data]
path = "{data}"
row_tokens = {row_tokens}
max_documents = 64
data_epochs = 10000
count_ahead_bytes = 0
[ring]
num_slots = 8
capacity = 3
[groups.main]
sync = "{sync}"
sync_lease_seconds = 2
[drafter]
num_layers = {drafter_layers}
block_size = {block_size}
num_anchors = {num_anchors}
precision = "{precision}"
[optimizer]
schedule = "constant"
learning_rate = 1e-4
[training]
checkpoint_steps = 1000000
[control_plane]
port = 0
"""


def make_parser(description: str, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every topology."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / out,
                        help="JSON file; the report is written beside it")  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, required=True, help="where targets and runs are written"
    )
    parser.add_argument("--seconds", type=positive, default=60, help="of each measurement")
    parser.add_argument(
        "--tokenizer-of", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct")
    )
    parser.add_argument(
        "--data", type=Path, default=Path("benchmarks/data/smollm2_answers.jsonl.gz")
    )
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    return parser


def make_run(options: Any, machine: Machine, name: str, shape: str, *, num_targets: int = 1,
             sync: str = "none") -> tuple[Path, Path]:  # fmt: skip
    """Write a target and a run's config; return the run's directory and the config."""
    sizes: TargetShape = SHAPES[shape if machine.gpus else "tiny"]
    key = shape if machine.gpus else "tiny"
    model = write_target(
        options.folder / f"target-{key}", sizes, options.tokenizer_of, machine.device
    )
    directory = (options.folder / name).resolve()
    text = _CONFIG.format(
        name=name, directory=directory, device=machine.device, model=model.resolve(),
        dtype="bfloat16" if machine.gpus else "float32", num_targets=num_targets,
        data=options.data.resolve(), row_tokens=sizes.row_tokens, sync=sync,
        drafter_layers=sizes.drafter_layers, block_size=sizes.block_size,
        num_anchors=sizes.num_anchors, precision=options.precision if machine.gpus else "bf16",
    )  # fmt: skip
    config = options.folder / f"{name}.toml"
    config.write_text(text)
    return directory, config
