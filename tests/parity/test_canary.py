"""A target whose layers add known constants: every value that reaches a slot is known beforehand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.shared import GroupTable, RingTable, TargetTable
from common.contracts.rows import RowSchema
from common.ring.owner import RingOwner
from common.ring.segment import MemorySegment
from common.target.checks import check_features, check_head
from common.target.features import FeatureTap
from common.target.loading import describe_target, load_target
from common.target.weights import load_embedding_and_head
from common.tensors import slot_tensor
from services.target_server.capture import Capture
from services.target_server.packing import PackedRow, Sample, make_row
from tests.targets import NUM_LAYERS, VOCAB_SIZE, make_tiny_target

HIDDEN = 32
LENGTHS = (12, 1, 20)


@pytest.fixture
def table(tmp_path: Path) -> TargetTable:
    """A Llama whose layer l adds l + 1 to whole-numbered embeddings; its final norm is no identity."""
    path = make_tiny_target(tmp_path, mlp_bias=True)
    tensors = load_file(path / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    tensors["model.embed_tokens.weight"] = torch.randint(
        -8, 9, (VOCAB_SIZE, HIDDEN), generator=random
    ).float()
    tensors["model.norm.weight"] = torch.rand(HIDDEN, generator=random) + 0.5
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}self_attn.o_proj.weight"].zero_()
        tensors[f"{prefix}mlp.down_proj.weight"].zero_()
        tensors[f"{prefix}mlp.down_proj.bias"].fill_(layer + 1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return TargetTable(model=str(path), dtype="float32")


def added_up_to(layer: int) -> int:
    """Return what layers 0 .. layer have added."""
    return (layer + 1) * (layer + 2) // 2


def make_canary_row() -> PackedRow:
    chooser = np.random.default_rng(1)
    samples = [
        Sample(
            index, 0, chooser.integers(3, 280, length).astype(np.int32), np.ones(length, np.uint8)
        )
        for index, length in enumerate(LENGTHS)
    ]
    return make_row(samples, 128, 0, 0)


def test_every_value_in_a_slot_is_what_the_named_layers_have_added(
    table: TargetTable, tmp_path: Path
) -> None:
    layer_ids = (1, 2, 3)
    schema = RowSchema(
        row_tokens=128, max_documents=4, hidden_size=HIDDEN, target_layer_ids=layer_ids,
        aux_dtype="bfloat16", has_last_hidden_states_normed=True, target_fingerprint="t",
        template_fingerprint="t", feature_engine="t",
    )  # fmt: skip
    model, row = load_target(table, "cpu"), make_canary_row()
    embedding = model.get_input_embeddings().weight[torch.from_numpy(row.token_ids).long()]
    with (
        RingOwner(
            endpoint=tmp_path / "t.sock", run="canary", schema=schema, table=RingTable(num_slots=1),
            groups={"main": GroupTable()}, backing=MemorySegment,
        ) as ring,
        FeatureTap(model, layer_ids, keep_last_normed=True) as tap,
        ring.loan(1.0) as slot,
    ):  # fmt: skip
        Capture(model, tap, ring.layout, is_packed=True).write(row, slot).wait()
        features = slot_tensor(ring.layout, "aux_hidden_states", slot.memory).float()
        last = slot_tensor(ring.layout, "last_hidden_states_normed", slot.memory).float()
        used = slice(0, row.used_tokens)
        for layer, part in zip(layer_ids, features.chunk(3, -1), strict=True):
            # Whole numbers below 256 are exact in bfloat16.
            assert torch.equal(part[used], embedding[used] + added_up_to(layer))
        raw = embedding[used] + added_up_to(NUM_LAYERS - 1)
        normed = raw / raw.pow(2).mean(-1, keepdim=True).sqrt() * model.model.norm.weight
        torch.testing.assert_close(last[used], normed, rtol=2.0**-8, atol=0)
        assert (last[used] - raw / raw.pow(2).mean(-1, keepdim=True).sqrt()).abs().max() > 0.1


def test_the_start_up_checks_know_its_layers_and_its_norm(table: TargetTable) -> None:
    model, target = load_target(table, "cpu"), describe_target(table)
    tables = load_embedding_and_head(table, "cpu", torch.float32)
    (token_ids,) = torch.from_numpy(make_canary_row().token_ids)[None, : LENGTHS[0]]
    with FeatureTap(model, (0, 1, 2, 3, 4)) as tap:
        assert all(layer.holds for layer in check_features(model, tap, token_ids))
    assert check_head(model, target, tables, [token_ids]).is_whole
