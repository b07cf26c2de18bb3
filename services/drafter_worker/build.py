"""Puts a drafter worker together: session, drafter, buffers, optimizer, checkpoints."""

import contextlib
import hashlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.contracts.rows import RowSchema
from common.contracts.sequences import SequenceSet
from common.drafters.dflash.checkpoint import load_state, read_spec
from common.drafters.dflash.config import DrafterSpec, needs_target, resolve_spec
from common.drafters.dflash.float8_products import float8_products
from common.drafters.dflash.model import DFlashDrafter, plain_products
from common.drafters.dflash.objective import DFlashObjective
from common.errors import CheckpointError, ConfigError
from common.float8 import check_device
from common.ring.worker_rings import WorkerRings
from common.run_record import commit, versions
from common.target.chat import has_template
from common.target.loading import (
    TargetDescription,
    describe_target,
    load_tokenizer,
    num_token_ids,
    resolve_mask_token_id,
    resolve_target_layer_ids,
)
from common.target.weights import load_embedding_and_head
from common.tensors import RowBuffers
from services.drafter_worker.checkpoint import CheckpointStore, read_run, read_trainer
from services.drafter_worker.config import WorkerConfig
from services.drafter_worker.initial import initialise, with_own_values
from services.drafter_worker.meter import Progress
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper
from services.drafter_worker.stream import TargetWatch

WAIT_SECONDS = 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainee:
    """A drafter with everything that trains it, before the first row."""

    spec: DrafterSpec
    drafter: DFlashDrafter
    optimizer: MasterOptimizer
    progress: Progress
    consumed: SequenceSet
    target: TargetDescription
    template_fingerprint: str | None
    """How the rows of its checkpoint were rendered and masked; None without a checkpoint."""
    is_resumed: bool = False
    """Whether all this is a checkpoint's."""
    sums: tuple[float, ...] = ()
    """Packed sums of the checkpoint since its last line of metrics."""

    @property
    def working_dtype(self) -> torch.dtype:
        """Element type that the network computes with."""
        return self.optimizer.working[0].dtype


def build_trainee(config: WorkerConfig, store: CheckpointStore) -> Trainee:
    """Make the drafter: from the newest checkpoint of the store, or from its initial weights."""
    device = torch.device(config.run.device)
    target = describe_target(config.target)
    newest = store.newest()
    spec = make_spec(config, target, newest)
    in_float8 = config.drafter.precision == "fp8"
    if in_float8:
        check_device(device, "drafter.precision")
    drafter = DFlashDrafter(spec, float8_products if in_float8 else plain_products)
    if newest is None:
        initialise(drafter, config, target)
    else:
        _check_same_spec(newest, spec)
        with _named_way_out(newest):
            load_state(drafter, newest)
    # Masters are taken before the working weights are rounded.
    masters = [p.detach().float().clone().to(device) for p in drafter.parameters()]
    drafter.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    # A sum of gradients over a group needs the place that accumulation has for them.
    is_summed = config.groups[config.training.group].sync == "allreduce"
    accumulation = max(config.training.accumulation, 2 if is_summed else 1)
    optimizer = MasterOptimizer(drafter.parameters(), masters, config.optimizer, accumulation)
    progress, consumed = Progress(), SequenceSet()
    sums: tuple[float, ...] = ()
    template = None
    if newest is not None:
        with _named_way_out(newest):
            tensors, state = read_trainer(newest)
            optimizer.load_state(tensors)
            template = read_run(newest).get("template_fingerprint")
        progress = Progress(state.step, state.trained_rows, state.trained_tokens)
        consumed, sums = state.consumed, state.sums
    return Trainee(
        spec, drafter, optimizer, progress, consumed, target,
        template_fingerprint=template, is_resumed=newest is not None, sums=sums,
    )  # fmt: skip


def make_spec(
    config: WorkerConfig, target: TargetDescription, newest: Path | None = None
) -> DrafterSpec:
    """Return the drafter's shape: the config's, and the target's where that leaves it open.

    Args:
        newest: the checkpoint that training goes on from; `init_from` is not read again then.
    """
    spec = resolve_spec(
        config.drafter,
        target,
        target_layer_ids=resolve_target_layer_ids(config.target, target.num_layers),
        mask_token_id=resolve_mask_token_id(
            config.target, num_token_ids(load_tokenizer(config.target)), target.vocab_size
        ),
    )
    init_from = config.drafter.init_from
    return spec if init_from is None else with_own_values(spec, newest or init_from)


def wait_for_schema(
    rings: WorkerRings, watch: TargetWatch, stop: threading.Event
) -> RowSchema | None:
    """Wait for a target server; None where the run is to stop, or has nothing left to train."""
    while not stop.is_set():
        schema = rings.schema(WAIT_SECONDS)
        if schema is not None:
            return schema
        watch.check()
        if rings.is_drained:
            _log.info("the stream of this run is over: nothing is left to train")
            return None
    return None


def check_schema(schema: RowSchema, config: WorkerConfig, trainee: Trainee) -> None:
    """Refuse rows that this drafter cannot read, and anchors that no row can have."""
    if schema.aux_dtype == "float8_e4m3fn":
        check_device(torch.device(config.run.device))
    if config.drafter.num_anchors > schema.row_tokens:
        raise ConfigError(
            f"drafter.num_anchors got {config.drafter.num_anchors}, expected at most the "
            f"{schema.row_tokens} tokens of a row; lower it, or raise data.row_tokens"
        )
    loss = config.drafter.loss
    if needs_target(loss) and not schema.has_last_hidden_states_normed:
        raise ConfigError(
            f"rows of the target server: got none of the target's last hidden states, which "
            f"drafter.loss {loss!r} needs; start the target server with "
            f"target.last_hidden_states_normed = true"
        )
    expected = {
        "target_layer_ids": trainee.spec.target_layer_ids,
        "hidden_size": trainee.spec.hidden_size,
        "target_fingerprint": trainee.target.fingerprint,
    }
    for name, value in expected.items():
        got = getattr(schema, name)
        if got != value:
            raise ConfigError(
                f"group {config.training.group!r}, rows of the target server: {name} got {got!r}, "
                f"expected {value!r}; give target server and worker the same [target]"
            )
    _check_template(schema.template_fingerprint, config, trainee)


def build_objective(config: WorkerConfig, trainee: Trainee, schema: RowSchema) -> DFlashObjective:
    """Join the drafter with the target's embedding and head."""
    device = torch.device(config.run.device)
    tables = load_embedding_and_head(config.target, device, trainee.working_dtype)
    return DFlashObjective(
        trainee.drafter,
        embedding=tables.embedding,
        head=tables.head,
        num_anchors=config.drafter.num_anchors,
        max_documents=schema.max_documents,
        loss_chunk_rows=config.drafter.loss_chunk_rows,
        backend="blocks" if device.type == "cuda" else "dense",
        head_rows=config.drafter.head_rows,
        loss=config.drafter.loss,
        precision=config.drafter.precision,
        target_softcap=trainee.target.logit_softcap,
    ).to(device)


def build_stepper(
    config: WorkerConfig, trainee: Trainee, schema: RowSchema, objective: DFlashObjective
) -> Stepper:
    """Put the objective on its static buffers; on CUDA this compiles and captures."""
    device = torch.device(config.run.device)
    on_cuda = device.type == "cuda"
    return Stepper(
        objective,
        trainee.optimizer,
        RowBuffers.allocate(schema, device, trainee.working_dtype),
        use_compile=on_cuda and config.drafter.compile,
        use_cuda_graphs=on_cuda and config.drafter.cuda_graphs,
    )


def compile_key(config: WorkerConfig, trainee: Trainee, schema: RowSchema) -> str:
    """Name what a worker compiles: kernels, and graphs of these shapes for this GPU."""
    what = {
        "gpu": torch.cuda.get_device_name(),
        "spec": asdict(trainee.spec),
        "drafter": config.drafter.model_dump(
            mode="json", exclude={"compile_cache", "init", "init_from"}
        ),
        "optimizer": config.optimizer.kind,
        "target_softcap": trainee.target.logit_softcap,
        "row": [schema.row_tokens, schema.max_documents, schema.has_last_hidden_states_normed],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def describe_run(config: WorkerConfig, trainee: Trainee, schema: RowSchema) -> dict[str, Any]:
    """Return run.json: where a checkpoint is from."""
    return {
        "config": config.model_dump(mode="json"),
        "command_line": sys.argv,
        "versions": versions(),
        "commit": commit(),
        "target_fingerprint": trainee.target.fingerprint,
        "template_fingerprint": schema.template_fingerprint,
        "feature_engine": schema.feature_engine,
    }


def describe_agreement(config: WorkerConfig, trainee: Trainee, schema: RowSchema) -> dict[str, Any]:
    """Return what the workers of a synced group must have alike, by the names of the settings."""
    group = config.groups[config.training.group]
    drafter = config.drafter.model_dump(mode="json", include={"loss", "precision", "num_anchors"})
    return {
        **{f"drafter.{name}": value for name, value in drafter.items()},
        **{f"drafter.{name}": json.dumps(value) for name, value in asdict(trainee.spec).items()},
        **{f"optimizer.{k}": v for k, v in config.optimizer.model_dump(mode="json").items()},
        "groups.sync": group.sync,
        "groups.sync_steps": group.sync_steps,
        "run.seed": config.run.seed,
        "target_fingerprint": trainee.target.fingerprint,
        "template_fingerprint": schema.template_fingerprint,
    }


def _check_template(got: str, config: WorkerConfig, trainee: Trainee) -> None:
    """Refuse rows that are rendered unlike this worker's config, or masked unlike its checkpoint."""
    kwargs = config.target.chat_template_kwargs
    if not has_template(got, load_tokenizer(config.target), kwargs):
        raise ConfigError(
            f"rows of the target server: template_fingerprint got {got!r}, expected another for the "
            f"worker's tokenizer, chat template and chat_template_kwargs={kwargs!r}; give target "
            f"server and worker the same [target]"
        )
    if trainee.template_fingerprint not in (None, got):
        raise ConfigError(
            f"rows of the target server: template_fingerprint got {got!r}, expected "
            f"{trainee.template_fingerprint!r} of the checkpoint: data.row_tokens or the mask options "
            f"differ; give the old ones, or choose another run.directory"
        )


@contextlib.contextmanager
def _named_way_out(checkpoint: Path) -> Iterator[None]:
    """A checkpoint that cannot be read is for the user to decide about."""
    try:
        yield
    except CheckpointError as error:
        where = "" if str(checkpoint) in str(error) else f"checkpoint {str(checkpoint)!r}: "
        raise ConfigError(
            f"{where}{error}; remove that directory to go on from the one before it, or choose another "
            f"run.directory"
        ) from error


def _check_same_spec(checkpoint: Path, spec: DrafterSpec) -> None:
    # The decay of the loss is no part of the network and not in its files.
    with _named_way_out(checkpoint):
        saved = read_spec(checkpoint)
    differences = [d for d in saved.differences(spec) if "loss_decay" not in d]
    if differences:
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} is of another drafter (its value and the config's): "
            f"{'; '.join(differences)}; choose another run.directory, or the old [drafter] and [target]"
        )
