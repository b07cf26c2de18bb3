"""Whose drafter is accepted sooner: this project's, or one trained by a peer's model and loss?

    python -m benchmarks.acceptance_race --config benchmarks/acceptance_race.toml --out DIR [--seconds 45] [--points 6] [--json]
        [--arms ours:8:random ours:8:target_layers specforge:8:random specforge_packed:8:random]

Each arm trains a drafter (who:block size:initial weights) for so many seconds on the same rows of the
config's target and data, held on the device, from the same initial weights under the same schedule: warm-up
and cosine over the steps that fit. The clock stands while acceptance is measured: the replay walk over the
target's greedy answers to `held_out.prompts`. The last weights are left in DIR/<arm>, servable, for
`ringdraft eval --draft`.

`specforge` gets each row's conversations as its own recipe does, one a sequence, padded to the longest of all;
`specforge_packed` gets the row as it is, as one conversation. Both draw as many anchors a step as `ours`.
Needs `pip install --no-deps specforge==0.2.0`.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.float8_loss import captured, row_buffers
from benchmarks.peers import specforge_model
from common.config.loading import load
from common.contracts.control_messages import HeldOutFigures
from common.contracts.rows import RowSchema
from common.drafters.dflash.checkpoint import write_drafter
from common.drafters.dflash.config import DrafterSpec
from common.held_out import FILE_NAME, read_held_out
from common.target.features import FeatureTap
from common.target.loading import (
    describe_target,
    load_target,
    load_tokenizer,
    resolve_target_layer_ids,
)
from common.target.weights import load_embedding_and_head
from common.tensors import RowBuffers
from services.drafter_worker.build import build_objective, build_stepper, build_trainee
from services.drafter_worker.checkpoint import CheckpointStore
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.held_out import HeldOut
from services.drafter_worker.schedule import Schedule
from services.target_server.assemble import make_schema, resumable_template
from services.target_server.config import TargetServerConfig
from services.target_server.held_out import prepare_held_out

DECAY_GAMMA = {4: 2.0, 8: 4.0, 10: 5.0, 16: 7.0}
"""Of the DFlash paper, by block size."""
_WARM_UP, _TIMED = 20, 40
_TILE = 128


class Arm(Protocol):
    """A drafter under training."""

    spec: DrafterSpec

    def begin(self, num_steps: int) -> None:
        """Take the initial weights, for a run of so many steps."""

    def step(self, row: RowBuffers, number: int) -> None:
        """Train on a row."""

    def weights(self) -> dict[str, Tensor]:
        """Return the drafter's tensors by name."""

    def measure(self) -> tuple[HeldOutFigures, ...]:
        """Return acceptance on the held-out answers."""


class Ours:
    """The worker's own step, compiled and captured on a GPU."""

    def __init__(self, worker: WorkerConfig, schema: RowSchema) -> None:
        torch.compiler.set_stance("default")
        self._config, self._seed = worker, worker.run.seed
        with tempfile.TemporaryDirectory() as nothing:
            self._trainee = build_trainee(worker, CheckpointStore(Path(nothing), keep=1))
        self.spec = self._trainee.spec
        self._objective = build_objective(worker, self._trainee, schema)
        self._stepper = build_stepper(worker, self._trainee, schema, self._objective)
        state = self._trainee.optimizer.state()
        self._start = {name: tensor.clone() for name, tensor in state.items()}
        rows = read_held_out(worker.run.directory / FILE_NAME, schema)
        self._held_out = HeldOut(self._objective, rows, self._trainee.working_dtype)

    def begin(self, num_steps: int) -> None:
        table = self._config.optimizer.model_copy(update={"schedule_steps": num_steps})
        self._schedule = Schedule(table, num_steps)
        self._trainee.optimizer.load_state(self._start)
        self._stepper.take_sums()

    def step(self, row: RowBuffers, number: int) -> None:
        self._stepper.load(row, (self._seed, number, 0))
        self._stepper.micro()
        self._stepper.update(self._schedule.at(number, number + 1))

    def weights(self) -> dict[str, Tensor]:
        return self._trainee.drafter.state_dict()

    def measure(self) -> tuple[HeldOutFigures, ...]:
        return self._held_out.measure()


class SpecForge:
    """SpecForge's model, loss and optimizer; measured in a drafter of ours with its weights."""

    def __init__(
        self, worker: WorkerConfig, schema: RowSchema, longest: int, *, is_packed: bool
    ) -> None:
        torch.compiler.set_stance("default")
        self._config, self._longest, self._is_packed = worker, longest, is_packed
        self._num_documents = schema.max_documents
        with tempfile.TemporaryDirectory() as nothing:
            trainee = build_trainee(worker, CheckpointStore(Path(nothing), keep=1))
        self.spec = trainee.spec
        self._drafter = trainee.drafter
        self._start = {name: x.clone() for name, x in trainee.drafter.state_dict().items()}
        objective = build_objective(worker, trainee, schema)
        rows = read_held_out(worker.run.directory / FILE_NAME, schema)
        self._held_out = HeldOut(objective, rows, trainee.working_dtype)
        anchors = worker.drafter.num_anchors
        device = torch.device(worker.run.device)
        self._model = specforge_model(
            trainee.spec,
            anchors if is_packed else -(-anchors // schema.max_documents),
            liger=False,
            device=device,
        )
        tables = load_embedding_and_head(worker.target, device, torch.bfloat16)
        self._model.embed_tokens.weight.data.copy_(tables.embedding)
        self._model.lm_head.weight.data.copy_(tables.head)

    def begin(self, num_steps: int) -> None:
        from specforge.optimizer import BF16Optimizer

        table = self._config.optimizer
        self._model.draft_model.load_state_dict(self._start)
        self._optimizer = BF16Optimizer(
            self._model.draft_model, lr=table.learning_rate, weight_decay=table.weight_decay,
            max_grad_norm=table.max_gradient_norm, total_steps=num_steps,
            warmup_ratio=table.warmup_ratio,
        )  # fmt: skip

    def step(self, row: RowBuffers, number: int) -> None:
        del number
        features = row.aux_hidden_states.bfloat16()
        parts = (row.token_ids.long(), features, row.loss_mask.float())
        batch = [self._laid_out(part, row) for part in parts]
        loss, *_ = self._model(*batch)
        loss.backward()
        self._optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return self._model.draft_model.state_dict()

    def measure(self) -> tuple[HeldOutFigures, ...]:
        self._drafter.load_state_dict(self.weights())
        return self._held_out.measure()

    def _laid_out(self, values: Tensor, row: RowBuffers) -> Tensor:
        """Return a row's values [T, ...] as one sequence, or as one a conversation, zeros behind each."""
        if self._is_packed:
            return values[None]
        wide = values.new_zeros(self._num_documents + 1, self._longest, *values.shape[1:])
        # Padding, whose document is -1, falls into the last sequence.
        wide[row.document_ids.long(), row.position_ids.long()] = values
        return wide[:-1]


def main() -> None:
    """Run every arm and print its points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--arms", nargs="+", default=["ours:8:random", "specforge:8:random"])
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    settings = [*options.settings, f"run.directory={options.out}"]
    server = load(TargetServerConfig, options.config, settings)
    worker = load(WorkerConfig, options.config, settings)
    schema, rows = capture(server)
    longest = max(int(row.position_ids.max()) for row in rows) // _TILE * _TILE + _TILE
    figures = {"rows": len(rows), "row_tokens": schema.row_tokens, "longest": longest}
    print(json.dumps(figures) if options.json else figures, flush=True)
    for name in options.arms:
        arm = make_arm(name, worker, schema, longest)
        for point in race(arm, rows, worker.run.seed, options.seconds, options.points):
            line = {"arm": name, **point}
            print(json.dumps(line) if options.json else line, flush=True)
        folder = options.out / name.replace(":", "-")
        folder.mkdir(exist_ok=True)
        write_drafter(folder, arm.weights(), arm.spec)
        del arm
        torch.compiler.reset()


def capture(server: TargetServerConfig) -> tuple[RowSchema, list[RowBuffers]]:
    """Write the held-out answers; return all rows of the data with their features, on the device."""
    target, tokenizer = describe_target(server.target), load_tokenizer(server.target)
    layer_ids = resolve_target_layer_ids(server.target, target.num_layers)
    schema = make_schema(server, target, layer_ids, resumable_template(server, tokenizer))
    model = load_target(server.target, server.run.device)
    with FeatureTap(model, layer_ids) as tap:
        prepare_held_out(
            server, schema, model, tap, tokenizer, is_packed=True, stop=threading.Event()
        )
    device = torch.device(server.run.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = [
        row_buffers(row, features, device, dtype)
        for row, features in captured(server, layer_ids, 1 << 30)
    ]
    return schema, rows


def make_arm(name: str, worker: WorkerConfig, schema: RowSchema, longest: int) -> Arm:
    """Return the arm of a name such as ours:8:random."""
    who, block_size, init = name.split(":")
    size = int(block_size)
    drafter = {"block_size": size, "init": init, "loss_decay_gamma": DECAY_GAMMA[size]}
    table = worker.drafter.model_copy(update=drafter)
    worker = worker.model_copy(update={"drafter": table})
    if who == "ours":
        return Ours(worker, schema)
    return SpecForge(worker, schema, longest, is_packed=who == "specforge_packed")


def race(
    arm: Arm, rows: list[RowBuffers], seed: int, seconds: float, num_points: int
) -> Iterator[dict[str, object]]:
    """Train for so many seconds; yield acceptance before the first step and at equal distances."""
    arm.begin(_WARM_UP + _TIMED)
    run_steps(arm, rows, seed, range(_WARM_UP))
    took = run_steps(arm, rows, seed, range(_WARM_UP, _WARM_UP + _TIMED))
    num_steps = max(num_points, int(seconds / took * _TIMED))
    arm.begin(num_steps)
    trained = 0.0
    for point in range(num_points + 1):
        done, end = (max(0, point - 1) * num_steps // num_points, point * num_steps // num_points)
        trained += run_steps(arm, rows, seed, range(done, end))
        total, *parts = arm.measure()
        yield {
            "seconds": round(trained, 2),
            "step": end,
            "epochs": round(end / len(rows), 2),
            "acceptance_length": round(total.acceptance_length, 4),
            "acceptance_rate_at": [round(rate, 3) for rate in total.acceptance_rate_at],
            "sources": {
                f"{part.tag}, {part.context}": [
                    part.num_answers, round(part.acceptance_length, 4),
                ] for part in parts
            },
        }  # fmt: skip


def run_steps(arm: Arm, rows: list[RowBuffers], seed: int, steps: range) -> float:
    """Train on the rows of these steps, in an order that is another one each epoch; return seconds."""
    synchronize()
    start = time.perf_counter()
    for step in steps:
        epoch, index = divmod(step, len(rows))
        if step == steps.start or not index:
            order = random.Random(f"{seed} {epoch}").sample(range(len(rows)), len(rows))
        arm.step(rows[order[index]], step)
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
