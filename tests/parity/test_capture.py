"""What the target server writes into a slot is what the model computes, and nothing older."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.config.shared import GroupTable, RingTable, TargetTable
from common.contracts.rows import RowSchema
from common.errors import NonFiniteTensorError
from common.float8 import dequantise
from common.ring.owner import RingOwner, WritableSlot
from common.ring.segment import MemorySegment
from common.target.features import FeatureTap
from common.target.loading import load_target
from common.tensors import slot_tensor
from services.target_server.capture import Capture
from services.target_server.packing import PackedRow, Sample, make_row
from tests.targets import make_tiny_target

LAYERS = (1, 3)


def make_packed_row(lengths: tuple[int, ...]) -> PackedRow:
    chooser = np.random.default_rng(0)
    samples = [
        Sample(
            sample_id=index,
            tag=0,
            token_ids=chooser.integers(3, 250, length).astype(np.int32),
            loss_mask=np.ones(length, dtype=np.uint8),
        )
        for index, length in enumerate(lengths)
    ]
    return make_row(samples, 128, 0, 0)


@pytest.fixture
def target(tmp_path: Path) -> torch.nn.Module:
    make_tiny_target(tmp_path / "target")
    return load_target(TargetTable(model=str(tmp_path / "target"), dtype="float32"), "cpu")


@pytest.fixture(params=[("bfloat16", False), ("bfloat16", True), ("float8_e4m3fn", True)])
def ring(request: pytest.FixtureRequest, tmp_path: Path, target: torch.nn.Module) -> RingOwner:
    schema = RowSchema(
        row_tokens=128,
        max_documents=4,
        hidden_size=target.config.hidden_size,
        target_layer_ids=LAYERS,
        aux_dtype=request.param[0],
        has_last_hidden_states_normed=request.param[1],
        target_fingerprint="t",
        template_fingerprint="t",
        feature_engine="t",
    )
    with RingOwner(
        endpoint=tmp_path / "t.sock", run="capture", schema=schema, table=RingTable(num_slots=1),
        groups={"main": GroupTable()}, backing=MemorySegment,
    ) as owner:  # fmt: skip
        yield owner


def features_in(ring: RingOwner, slot: WritableSlot) -> torch.Tensor:
    """Return what a drafter reads out of a slot, in float32."""
    aux = slot_tensor(ring.layout, "aux_hidden_states", slot.memory)
    if ring.layout.schema.aux_dtype == "bfloat16":
        return aux.float()
    out = torch.full(aux.shape, float("nan"))
    dequantise(aux, slot_tensor(ring.layout, "aux_scales", slot.memory), out)
    return out


def tolerance_of(ring: RingOwner, features: torch.Tensor) -> dict[str, float]:
    """Return half a step of the element type; the smallest of a float8 token have a fixed one."""
    if ring.layout.schema.aux_dtype == "bfloat16":
        return {"rtol": 2.0**-8, "atol": 0.0}
    return {"rtol": 2.0**-4 + 1e-5, "atol": features.abs().max().item() * 2.0**-18}


def test_a_slot_holds_each_documents_own_hidden_states_and_zeros_behind(
    target: torch.nn.Module, ring: RingOwner
) -> None:
    row = make_packed_row((30, 41))
    slot, keeps_last = ring.loan(1.0), ring.layout.schema.has_last_hidden_states_normed
    with FeatureTap(target, LAYERS, keep_last_normed=keeps_last) as tap, slot:
        for name in ring.layout.fields:  # what an older row might have left: all NaN
            slot_tensor(ring.layout, name, slot.memory).view(torch.uint8).fill_(0xFF)
        Capture(target, tap, ring.layout, is_packed=True).write(row, slot).wait()
        aux = features_in(ring, slot)
        for document in row.documents:
            span = slice(document.start, document.start + document.length)
            ids = torch.from_numpy(row.token_ids[span]).long()[None]
            states = target(ids, output_hidden_states=True, use_cache=False).hidden_states
            expected = torch.cat([states[layer + 1][0] for layer in LAYERS], -1)
            torch.testing.assert_close(aux[span], expected, **tolerance_of(ring, expected))
            if keeps_last:
                last = slot_tensor(ring.layout, "last_hidden_states_normed", slot.memory)
                torch.testing.assert_close(last[span].float(), states[-1][0], rtol=2.0**-8, atol=0)
                assert (last[row.used_tokens :] == 0).all()
        assert (aux[row.used_tokens :] == 0).all()
        ids = slot_tensor(ring.layout, "token_ids", slot.memory)
        assert torch.equal(ids, torch.from_numpy(row.token_ids))


def test_hidden_states_that_are_not_finite_name_the_samples(
    target: torch.nn.Module, ring: RingOwner
) -> None:
    with torch.no_grad():
        target.get_input_embeddings().weight.fill_(float("inf"))
    slot = ring.loan(1.0)
    with FeatureTap(target, LAYERS) as tap, slot:
        capture = Capture(target, tap, ring.layout, is_packed=True)
        with pytest.raises(NonFiniteTensorError, match=r"samples \[0, 1\]"):
            capture.write(make_packed_row((5, 6)), slot).wait()
