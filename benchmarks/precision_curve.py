"""Does training in float8 follow training in bfloat16?

    python -m benchmarks.precision_curve --config my.toml [--arms bf16:1 bf16:2 fp8:1 fp8:2]
        [--steps 2000] [--rows 400] [--held-out 24] [--json]

Each arm trains a drafter from the same initial weights (precision:seed; the seed chooses the anchors and the
order of the rows) on the same rows of the config's target and data, and is measured on the same rows
that none has trained on. The distance between two seeds of one precision is the noise. Needs a GPU.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.float8_loss import captured, row_buffers
from common.config.loading import load
from common.drafters.dflash.config import DrafterSpec, Precision
from common.drafters.dflash.float8_products import float8_products
from common.drafters.dflash.metrics import unpack_sums
from common.drafters.dflash.model import DFlashDrafter, plain_products
from common.drafters.dflash.objective import DFlashObjective
from common.target.loading import describe_target
from common.target.weights import FrozenTables, load_embedding_and_head
from common.tensors import RowBuffers
from services.drafter_worker.build import make_spec
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.schedule import Schedule
from services.drafter_worker.step import Stepper
from services.target_server.config import TargetServerConfig

POINTS = 10
DTYPE = torch.bfloat16


def capture_rows(server: TargetServerConfig, spec: DrafterSpec, count: int) -> list[RowBuffers]:
    """Return rows of the target with their features, on the GPU."""
    return [
        row_buffers(row, features, torch.device("cuda"), DTYPE)
        for row, features in captured(server, spec.target_layer_ids, count)
    ]


def make_stepper(
    worker: WorkerConfig,
    spec: DrafterSpec,
    precision: Precision,
    tables: FrozenTables,
    like: RowBuffers,
) -> Stepper:
    """Return the worker's stepper around a drafter of fixed random weights."""
    torch.manual_seed(0)
    products = float8_products if precision == "fp8" else plain_products
    drafter = DFlashDrafter(spec, products)
    masters = [p.detach().float().clone().cuda() for p in drafter.parameters()]
    drafter.to("cuda", DTYPE)
    objective = DFlashObjective(
        drafter, embedding=tables.embedding, head=tables.head,
        num_anchors=worker.drafter.num_anchors, max_documents=64,
        loss_chunk_rows=worker.drafter.loss_chunk_rows, backend="blocks", precision=precision,
    ).cuda()  # fmt: skip
    buffers = RowBuffers(
        *(torch.zeros_like(tensor) for tensor in vars(like).values() if tensor is not None)
    )
    optimizer = MasterOptimizer(drafter.parameters(), masters, worker.optimizer)
    torch.compiler.set_stance("default")
    return Stepper(objective, optimizer, buffers, use_compile=True, use_cuda_graphs=True)


def train(
    stepper: Stepper, rows: list[RowBuffers], held_out: list[RowBuffers], worker: WorkerConfig,
    seed: int, steps: int,
) -> Iterator[dict[str, float]]:  # fmt: skip
    """Yield the mean training loss of each tenth of the run, and held-out figures at its end."""
    schedule = Schedule(worker.optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if step % len(rows) == 0:
            permutation = torch.randperm(len(rows), generator=order).tolist()
        stepper.load(rows[permutation[step % len(rows)]], (seed, step, 0))
        stepper.micro()
        stepper.update(schedule.at(step, step + 1))
        if (step + 1) % (steps // POINTS) == 0:
            trained = unpack_sums(stepper.take_sums()[0])
            yield {
                "step": step + 1,
                "loss": trained.loss,
                "accepted": trained.accepted_prefix_length,
            }
    for number, row in enumerate(held_out):
        stepper.load(row, (0, number, 0))
        stepper.micro()
    held = unpack_sums(stepper.take_sums()[0])
    yield {
        "step": steps,
        "held_out_loss": held.loss,
        "held_out_accepted": held.accepted_prefix_length,
    }


def main() -> None:
    """Run every arm and print its points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--arms", nargs="+", default=["bf16:1", "bf16:2", "fp8:1", "fp8:2"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = load(TargetServerConfig, options.config, options.settings)
    worker = load(WorkerConfig, options.config, options.settings)
    spec = make_spec(worker, describe_target(worker.target))
    rows = capture_rows(server, spec, options.rows + options.held_out)
    held_out, rows = rows[: options.held_out], rows[options.held_out :]
    tables = load_embedding_and_head(worker.target, torch.device("cuda"), DTYPE)
    steppers: dict[str, Stepper] = {}
    starts: dict[str, dict[str, torch.Tensor]] = {}
    for arm in options.arms:
        precision, seed = arm.split(":")
        if precision not in steppers:
            steppers[precision] = make_stepper(worker, spec, precision, tables, rows[0])
            state = steppers[precision].optimizer.state()
            starts[precision] = {name: tensor.clone() for name, tensor in state.items()}
        stepper = steppers[precision]
        stepper.optimizer.load_state(starts[precision])
        for point in train(stepper, rows, held_out, worker, int(seed), options.steps):
            line = {"arm": arm, **{name: round(value, 4) for name, value in point.items()}}
            print(json.dumps(line) if options.json else line, flush=True)


if __name__ == "__main__":
    main()
