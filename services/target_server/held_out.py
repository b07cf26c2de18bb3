"""Writes the held-out rows of a run: prompts, the target's greedy answers, their hidden states.

    prompts in order -> greedy answers -> rows -> features -> held_out.safetensors

Nobody trains on them. The text is the target's own, so that walking over it as decoding would gives
the acceptance that decoding has (`metrics.replay_walk`).
"""

import hashlib
import logging
import threading

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.config.shared import HeldOutTable
from common.contracts.rows import RowSchema
from common.errors import ConfigError
from common.float8 import dequantise, quantise
from common.held_out import FILE_NAME, HeldOutRows, fingerprint_of, write_held_out
from common.target.features import FeatureTap, run_row
from services.target_server.answered_rows import AnsweredRows, Prompts
from services.target_server.config import TargetServerConfig
from services.target_server.data_config import DataTable, SourceTable
from services.target_server.generation import AnswerWriter
from services.target_server.packing import PackedRow

_log = logging.getLogger(__name__)


def prepare_held_out(
    config: TargetServerConfig,
    schema: RowSchema,
    model: PreTrainedModel,
    tap: FeatureTap,
    tokenizer: Tokenizer,
    *,
    is_packed: bool,
    stop: threading.Event,
) -> None:
    """Write the run's held-out rows, unless there are none to write or they are there already."""
    table = config.held_out
    if not table.prompts:
        return
    path = config.run.directory / FILE_NAME
    fingerprint = f"{schema.fingerprint}:{_hash_of(table)}"
    if fingerprint_of(path) == fingerprint:
        return
    data = _data_table(config)
    prompts = Prompts(data, tokenizer, config.target.chat_template_kwargs, config.run.seed)
    writer = AnswerWriter(model, config.generation.model_copy(update={"temperature": 0.0}), tap)
    answered = AnsweredRows(
        prompts, writer, data, max_new_tokens=table.max_new_tokens, seed=config.run.seed,
        journal=None, stop=stop,
    )  # fmt: skip
    try:
        rows = [row for row in answered.rows() if isinstance(row, PackedRow)]
    except ConfigError as error:
        raise ConfigError(f"held_out.prompts: {error}") from error
    if stop.is_set():
        return
    tags = tuple(source.tag_name for source in data.all_sources)
    features = [_features_of(row, schema, model, tap, is_packed=is_packed) for row in rows]
    write_held_out(path, _stacked(rows, features, schema.max_documents, tags), fingerprint)
    num_answers = sum(len(row.documents) for row in rows)
    _log.info("held-out rows: %d answers in %d rows", num_answers, len(rows))


def _data_table(config: TargetServerConfig) -> DataTable:
    """Return how the prompts are read and packed: in their files' order, into rows like the run's."""
    return DataTable(
        source="prompts",
        sources=tuple(SourceTable(path=path) for path in config.held_out.prompts),
        row_tokens=config.data.row_tokens,
        max_documents=config.data.max_documents,
        max_conversations=config.held_out.max_prompts,
        shuffle=False,
    )


def _hash_of(table: HeldOutTable) -> str:
    digest = hashlib.sha256(f"{table.max_prompts} {table.max_new_tokens}".encode())
    for path in table.prompts:
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _features_of(
    row: PackedRow, schema: RowSchema, model: PreTrainedModel, tap: FeatureTap, *, is_packed: bool
) -> Tensor:
    """Return hidden states [T, L*H] bfloat16 as a worker would have them, on the CPU."""
    device = next(model.parameters()).device
    ids, positions = (
        torch.from_numpy(array[: row.used_tokens]).to(device)
        for array in (row.token_ids, row.position_ids)
    )
    features = run_row(model, tap, ids, positions, is_packed=is_packed).aux_hidden_states
    if schema.aux_dtype == "float8_e4m3fn":
        values = torch.empty(features.shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(len(features), dtype=torch.float32, device=device)
        quantise(features, values, scales)
        features = torch.empty_like(features, dtype=torch.bfloat16)
        dequantise(values, scales, features)
    kept = torch.zeros(schema.row_tokens, features.shape[1], dtype=torch.bfloat16)
    kept[: row.used_tokens] = features
    return kept


def _stacked(
    rows: list[PackedRow], features: list[Tensor], max_documents: int, tags: tuple[str, ...]
) -> HeldOutRows:
    numbers = torch.full((len(rows), max_documents), -1, dtype=torch.int32)
    for index, row in enumerate(rows):
        for number, document in enumerate(row.documents):
            numbers[index, number] = document.tag
    parts = {
        name: torch.from_numpy(np.stack([getattr(row, name) for row in rows]))
        for name in ("token_ids", "document_ids", "position_ids", "loss_mask")
    }
    return HeldOutRows(
        **parts, aux_hidden_states=torch.stack(features), document_tags=numbers, tags=tags
    )
