"""What does a trained drafter notice of float8?

    python -m benchmarks.float8_loss --config my.toml --checkpoint runs/.../step-000234 [--rows 24] [--json]

Its loss and accepted prefix on the same rows and anchors, with the target's hidden states as they
are, as rows in bfloat16 and as rows in float8 hold them: one line each. `--set run.seed=...` packs
the data of the config in another order than the training did.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.float8_error import in_bfloat16, in_float8
from common.config.loading import load
from common.drafters.dflash.checkpoint import read_drafter
from common.drafters.dflash.metrics import unpack_sums
from common.drafters.dflash.objective import DFlashObjective, StagedRow
from common.target.features import FeatureTap, run_packed
from common.target.loading import load_target, load_tokenizer
from common.target.weights import load_embedding_and_head
from common.tensors import RowBuffers
from services.drafter_worker.config import WorkerConfig
from services.target_server.config import TargetServerConfig
from services.target_server.conversations import Conversations
from services.target_server.packing import PackedRow
from services.target_server.row_stream import RowStream

FORMS = {"exact": lambda features: features, "bf16": in_bfloat16, "fp8": in_float8}


def main() -> None:
    """Print one line for each form of a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = load(TargetServerConfig, options.config, options.settings)
    worker = load(WorkerConfig, options.config, options.settings)
    objective = make_objective(worker, server.data.max_documents, options.checkpoint)
    sums: dict[str, Tensor] = dict.fromkeys(FORMS, torch.zeros(()))
    for row, features in captured(server, objective.drafter.spec.target_layer_ids, options.rows):
        for name, form in FORMS.items():
            sums[name] = sums[name] + sums_of(objective, row, form(features), server.run.seed)
    for name, total in sums.items():
        figures = unpack_sums(total.tolist())
        line = {
            "row": name,
            "loss": round(figures.loss, 5),
            "accepted_prefix_length": round(figures.accepted_prefix_length, 4),
        }
        print(json.dumps(line) if options.json else "  ".join(f"{k} {v}" for k, v in line.items()))


def make_objective(config: WorkerConfig, max_documents: int, checkpoint: Path) -> DFlashObjective:
    """Return the training's objective around a checkpoint's drafter, in float32, uncompiled."""
    device = torch.device(config.run.device)
    tables = load_embedding_and_head(config.target, device, torch.float32)
    return DFlashObjective(
        read_drafter(checkpoint, device, torch.float32),
        embedding=tables.embedding,
        head=tables.head,
        num_anchors=config.drafter.num_anchors,
        max_documents=max_documents,
        loss_chunk_rows=config.drafter.loss_chunk_rows,
        backend="dense",
    ).to(device)


def captured(
    config: TargetServerConfig, layer_ids: tuple[int, ...], num_rows: int
) -> Iterator[tuple[PackedRow, Tensor]]:
    """Yield the first rows with their features [T, L*H], zeros on padding."""
    tokenizer = load_tokenizer(config.target)
    kwargs = config.target.chat_template_kwargs
    conversations = Conversations(config.data, tokenizer, kwargs, config.run.seed)
    model = load_target(config.target, config.run.device)
    with FeatureTap(model, layer_ids) as tap:
        for row in islice(RowStream(conversations, config.data).rows(), num_rows):
            used = row.used_tokens
            features = run_packed(
                model,
                tap,
                torch.from_numpy(row.token_ids[:used]).to(config.run.device),
                torch.from_numpy(row.position_ids[:used]).to(config.run.device),
            ).float()
            padding = features.new_zeros(len(row.token_ids) - used, features.shape[1])
            yield row, torch.cat([features, padding])


def row_buffers(
    row: PackedRow, features: Tensor, device: torch.device, dtype: torch.dtype
) -> RowBuffers:
    """Return a captured row on a device, as a worker's staging buffers hold it."""
    ids = (row.token_ids, row.document_ids, row.position_ids, row.loss_mask)
    tokens, documents, positions, mask = (torch.from_numpy(array).to(device) for array in ids)
    return RowBuffers(tokens, documents, positions, mask, features.to(device, dtype))


@torch.no_grad()
def sums_of(objective: DFlashObjective, row: PackedRow, features: Tensor, seed: int) -> Tensor:
    """Return the packed sums of one row."""
    buffers = row_buffers(row, features, features.device, features.dtype)
    draw = torch.tensor((seed, row.sequence, 0), device=features.device)
    _, sums = objective(StagedRow(**vars(buffers), draw=draw))
    return sums.double()


if __name__ == "__main__":
    main()
