"""Opens what a target server holds open, in order, onto a stack that closes it in reverse."""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.config.shared import RunTable
from common.contracts.control_messages import Phase
from common.contracts.data_manifest import DATA_MANIFEST
from common.contracts.rows import AuxDtype, RowSchema
from common.contracts.sequences import SequenceSet, Shard
from common.errors import ConfigError
from common.float8 import check_device
from common.folders import step_folders
from common.lifecycle import write_atomically
from common.ring.endpoint import ring_endpoint
from common.ring.layout import SlotLayout
from common.ring.owner import RingOwner
from common.ring.segment import reclaim_dead_segments, require_room
from common.target.chat import template_fingerprint
from common.target.features import FeatureTap
from common.target.loading import (
    TargetDescription,
    describe_target,
    load_target,
    load_tokenizer,
    resolve_target_layer_ids,
)
from common.target.weights import load_embedding_and_head
from services.target_server.announcer import Announcer
from services.target_server.answered_rows import AnsweredRows, Prompts
from services.target_server.capture import Capture
from services.target_server.checks import CheckList, check_target, check_vocabulary
from services.target_server.config import TargetServerConfig
from services.target_server.conversations import Conversations, manifest_of, mask_options
from services.target_server.cursors import Cursors
from services.target_server.generation import AnswerWriter
from services.target_server.held_out import prepare_held_out
from services.target_server.recipe_journal import RecipeJournal
from services.target_server.recipes import RecipeBook
from services.target_server.row_stream import RowStream
from services.target_server.server import TargetServer
from services.target_server.transport import Transport, choose_transport, transport_that_fits

AUX_DTYPES: dict[str, AuxDtype] = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
_log = logging.getLogger(__name__)


def open_server(
    config: TargetServerConfig,
    shard: Shard,
    summary: Path,
    stop: threading.Event,
    stack: contextlib.ExitStack,
    enter: Callable[[Phase, str], None],
) -> TargetServer:
    """Load the target, check it, open the ring that carries the rows of `shard`."""
    run = config.run
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    gpu = torch.cuda.current_device() if run.device == "cuda" else None
    transport = choose_transport(run, config.ring, gpu)
    if is_float8 := config.ring.aux_dtype == "fp8":
        check_device(torch.device(run.device))
    description = describe_target(config.target)
    layer_ids = resolve_target_layer_ids(config.target, description.num_layers)
    tokenizer = load_tokenizer(config.target)
    checks = CheckList()
    mask_token_id = check_vocabulary(checks, config.target, description, tokenizer)
    conversations = open_conversations(config, tokenizer)
    trial = RowStream(conversations, config.data)
    # How many rows answers will fill is not known before they are written.
    total_rows = None if isinstance(conversations, Prompts) else trial.count_rows()
    schema = make_schema(config, description, layer_ids, resumable_template(config, tokenizer))
    if transport.name == "host":  # before minutes of loading and checks
        require_room(config.ring.num_slots, SlotLayout(schema).slot_bytes)
    model = load_target(config.target, run.device)
    tap = FeatureTap(model, layer_ids, keep_last_normed=config.target.last_hidden_states_normed)
    checked = check_target(
        checks, model, tap, next(trial.rows()),
        target=description,
        tables=load_embedding_and_head(config.target, run.device, model.dtype),
        mask_token_id=mask_token_id,
        is_float8=is_float8,
    )  # fmt: skip
    if run.device == "cuda":
        torch.cuda.empty_cache()  # of the tables that were read for the checks, a worker's own size
    if shard.index == 0:
        enter("measuring", "writes the held-out answers")
        prepare_held_out(
            config, schema, model, tap, tokenizer, is_packed=checked.is_packed, stop=stop
        )
    ring = stack.enter_context(open_ring(config, shard, schema, transport, total_rows))
    answered = partial(answered_rows, config, shard, model, tap, stack, stop)
    stream = open_stream(config, shard, conversations, ring, answered)
    return TargetServer(
        target=str(config.target.model),
        recipes=open_recipes(config, stream, ring, shard),
        capture=Capture(model, tap, ring.layout, is_packed=checked.is_packed),
        announcer=stack.enter_context(Announcer()),
        ring=ring,
        checks=checked,
        total_rows=total_rows,
        tags=manifest_of(config.data).tags,
        skipped_samples=lambda: dict(stream.counts.skipped.counts),
        summary=summary,
        stop=stop,
    )


def open_conversations(config: TargetServerConfig, tokenizer: Tokenizer) -> Conversations:
    """Index the data: conversations with answers, or prompts that the target is to answer."""
    run, kwargs = config.run, config.target.chat_template_kwargs
    kind = Prompts if config.data.source == "prompts" else Conversations
    return kind(config.data, tokenizer, kwargs, run.seed, run.directory / "index")


def open_ring(
    config: TargetServerConfig,
    shard: Shard,
    schema: RowSchema,
    transport: Transport,
    total_rows: int | None,
) -> RingOwner:
    """Open the ring of one target, where the transport says or where it fits."""
    run = config.run
    reclaim_dead_segments()
    num_bytes = config.ring.num_slots * SlotLayout(schema).slot_bytes
    transport = transport_that_fits(transport, config.ring, num_bytes)
    _log.info("transport %s", transport.reason)
    return RingOwner(
        endpoint=ring_endpoint(run, config.ring, shard.index),
        run=run.name,
        schema=schema,
        table=config.ring,
        groups=config.groups,
        total_rows=total_rows,
        settled={name: committed_rows(run, name) for name in config.groups},
        shard=shard,
        backing=transport.backing,
        gpu=transport.gpu,
        transport_reason=transport.reason,
    )


def open_recipes(
    config: TargetServerConfig, stream: RowStream | AnsweredRows, ring: RingOwner, shard: Shard
) -> RecipeBook:
    """Say what the run trains on; begin with the first row of the ring that is not settled."""
    manifest = manifest_of(config.data).model_dump_json()
    write_atomically(config.run.directory / DATA_MANIFEST, manifest)
    start = ring.settled_below()
    return RecipeBook(stream.rows(start, shard), ring, start)


def open_stream(
    config: TargetServerConfig,
    shard: Shard,
    source: Conversations,
    ring: RingOwner,
    answered: Callable[[Prompts], AnsweredRows],
) -> RowStream | AnsweredRows:
    """Return the rows of a run: packed as the files have them, or answered first."""
    if isinstance(source, Prompts):
        return answered(source)
    folder = config.run.directory / "cursors" / f"target-{shard.index}"
    cursors = Cursors(folder, ring.settled_below)
    return RowStream(source, config.data, cursors)


def answered_rows(
    config: TargetServerConfig,
    shard: Shard,
    model: PreTrainedModel,
    tap: FeatureTap,
    stack: contextlib.ExitStack,
    stop: threading.Event,
    prompts: Prompts,
) -> AnsweredRows:
    """Return rows that the target answers, with the journal in the run's directory."""
    path = config.run.directory / "recipes" / f"target-{shard.index}.jsonl"
    return AnsweredRows(
        prompts,
        AnswerWriter(model, config.generation, tap),
        config.data,
        max_new_tokens=config.generation.max_new_tokens,
        seed=config.run.seed,
        journal=stack.enter_context(RecipeJournal(path, prompts.fingerprint, shard)),
        stop=stop,
    )


def make_schema(
    config: TargetServerConfig,
    target: TargetDescription,
    layer_ids: tuple[int, ...],
    template: str,
) -> RowSchema:
    """Return what both sides of the ring must agree on."""
    return RowSchema(
        row_tokens=config.data.row_tokens,
        max_documents=config.data.max_documents,
        hidden_size=target.hidden_size,
        target_layer_ids=layer_ids,
        aux_dtype=AUX_DTYPES[config.ring.aux_dtype],
        has_last_hidden_states_normed=config.target.last_hidden_states_normed,
        target_fingerprint=target.fingerprint,
        template_fingerprint=template,
        feature_engine=(
            f"transformers {version('transformers')} {target.attention or 'default'} "
            f"{config.target.dtype}"
        ),
    )


def resumable_template(config: TargetServerConfig, tokenizer: Tokenizer) -> str:
    """Return the template fingerprint of the rows; every checkpoint must have been made with it."""
    template = template_fingerprint(
        tokenizer,
        config.target.chat_template_kwargs,
        options=mask_options(config.data),
        max_tokens=config.data.row_tokens,
    )
    for name in config.groups:
        check_same_template(config.run, name, template)
    return template


def check_same_template(run: RunTable, group: str, template: str) -> None:
    """Refuse to go on with rows that are rendered or masked unlike those of the checkpoints."""
    for checkpoint in _newest_checkpoints(run, group):
        made_with = _read_json(checkpoint, "run.json").get("template_fingerprint")
        if made_with != template:
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r}: template_fingerprint got {made_with!r}, expected "
                f"{template!r}: tokenizer, chat template, its arguments, data.row_tokens or the mask "
                f"options are not those that it was trained with; give the old ones, or choose "
                f"another run.directory"
            )


def committed_rows(run: RunTable, group: str) -> SequenceSet:
    """Return what the newest checkpoints of a group's workers hold: those rows are not made again."""
    total = SequenceSet()
    for checkpoint in _newest_checkpoints(run, group):
        total = total.union(_consumed_by(checkpoint))
    return total


def _newest_checkpoints(run: RunTable, group: str) -> Iterator[Path]:
    for worker in sorted((run.directory / "checkpoints" / group).glob("*")):
        if steps := step_folders(worker):
            yield steps[-1]


def _consumed_by(checkpoint: Path) -> SequenceSet:
    state = _read_json(checkpoint, "trainer/state.json")
    try:
        return SequenceSet.model_validate_json(json.dumps(state["consumed"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(checkpoint, "trainer/state.json", error) from error


def _read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, name, error) from error
    if not isinstance(content, dict):
        raise _unreadable(checkpoint, name, TypeError(f"it is a {type(content).__name__}"))
    return content


def _unreadable(checkpoint: Path, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"checkpoint {str(checkpoint)!r}: {name} cannot be read: {error}; remove that "
        f"directory to go on from the one before it, or choose another run.directory"
    )
