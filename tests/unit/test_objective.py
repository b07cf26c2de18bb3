"""One row to one loss: what must not change it, what must be zero, and what can be learned."""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash import objective
from common.drafters.dflash.attention import BlockLayout, make_layout
from common.drafters.dflash.config import SLIDING_ATTENTION
from common.drafters.dflash.initialise import random_init
from common.drafters.dflash.metrics import StepFigures, unpack_sums
from common.drafters.dflash.model import DFlashDrafter
from common.drafters.dflash.objective import DFlashObjective, StagedRow
from tests.drafters import make_drafter, make_row, make_spec, make_tables

SPECS = {
    "full": {},
    "sliding": {"layer_types": (SLIDING_ATTENTION,) * 2, "sliding_window": 6},
}


def objective_of(
    drafter: DFlashDrafter, num_anchors: int = 12, **changes: object
) -> DFlashObjective:
    embedding, head = make_tables(drafter.spec)
    values = {"embedding": embedding, "head": head, "max_documents": 8, "loss_chunk_rows": 16}
    return DFlashObjective(drafter, num_anchors=num_anchors, backend="dense", **values | changes)


def loss_and_gradients(
    drafter: DFlashDrafter, row: StagedRow, **changes: object
) -> tuple[Tensor, Tensor, list[Tensor]]:
    drafter.zero_grad()
    loss, sums = objective_of(drafter, **changes)(row)
    loss.backward()
    return loss.detach(), sums, [parameter.grad.clone() for parameter in drafter.parameters()]


@pytest.mark.parametrize("kind", SPECS)
def test_padding_of_the_row_changes_nothing(kind: str) -> None:
    spec = make_spec(**SPECS[kind])
    drafter = make_drafter(spec)
    short = make_row(spec, (23, 14), num_tokens=37)
    padding = torch.nn.functional.pad
    long = StagedRow(
        token_ids=padding(short.token_ids, (0, 91), value=5),
        document_ids=padding(short.document_ids, (0, 91), value=-1),
        position_ids=padding(short.position_ids, (0, 91)),
        loss_mask=padding(short.loss_mask, (0, 91)),
        aux_hidden_states=padding(short.aux_hidden_states, (0, 0, 0, 91), value=7.0),
        draw=short.draw,
    )
    one, other = loss_and_gradients(drafter, short), loss_and_gradients(drafter, long)
    torch.testing.assert_close(one[:2], other[:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one[2], other[2], rtol=1e-3, atol=1e-3)


def test_chunks_of_the_head_change_nothing() -> None:
    spec = make_spec()
    drafter, row = make_drafter(spec), make_row(spec, (23, 14), num_tokens=40)
    whole = loss_and_gradients(drafter, row, loss_chunk_rows=1000)
    for chunk_rows in (1, 7):
        parts = loss_and_gradients(drafter, row, loss_chunk_rows=chunk_rows)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_documents_of_a_row_have_the_loss_that_they_have_alone() -> None:
    spec = make_spec()
    drafter = make_drafter(spec)
    packed = make_row(spec, (15, 11), num_tokens=26)
    total, sums, _ = loss_and_gradients(drafter, packed, num_anchors=64)
    parts = []
    for start, stop in ((0, 15), (15, 26)):
        alone = StagedRow(*(value[start:stop] for value in packed[:5]), draw=packed.draw)
        alone = alone._replace(document_ids=torch.zeros(stop - start, dtype=torch.int32))
        parts.append(loss_and_gradients(drafter, alone, num_anchors=64))
    torch.testing.assert_close(total, parts[0][0] + parts[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, parts[0][1] + parts[1][1], rtol=1e-5, atol=1e-5)


def test_row_without_supervision_has_zero_loss_and_zero_gradients() -> None:
    spec = make_spec()
    drafter = make_drafter(spec)
    row = make_row(spec, (23, 14), num_tokens=40)
    row.loss_mask.zero_()
    loss, sums, gradients = loss_and_gradients(drafter, row)
    assert loss == 0
    assert not sums.any()
    assert not any(gradient.any() for gradient in gradients)


def test_row_of_padding_alone_has_zero_loss_and_zero_gradients() -> None:
    spec = make_spec()
    loss, _, gradients = loss_and_gradients(make_drafter(spec), make_row(spec, (), 16))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_every_parameter_has_a_gradient() -> None:
    spec = make_spec()
    drafter = make_drafter(spec)
    _, _, gradients = loss_and_gradients(drafter, make_row(spec, (30,), num_tokens=32))
    names = [name for name, _ in drafter.named_parameters()]
    assert [n for n, g in zip(names, gradients, strict=True) if not g.any()] == []


def test_embedding_and_head_are_no_part_of_the_drafter() -> None:
    spec = make_spec()
    own = objective_of(make_drafter(spec))
    names = {name for name, _ in own.named_parameters()}
    assert names == {f"drafter.{name}" for name, _ in own.drafter.named_parameters()}
    assert not any("embed" in name or "head." in name for name in names)


def layout_that_lets_the_anchors_feature_in(
    anchors: Tensor, is_valid: Tensor, position_ids: Tensor, block_size: int
) -> BlockLayout:
    layout = make_layout(anchors, is_valid, position_ids, block_size)
    return layout._replace(context_stop=layout.context_stop + is_valid.to(torch.int32))


def layout_that_hides_the_last_feature(
    anchors: Tensor, is_valid: Tensor, position_ids: Tensor, block_size: int
) -> BlockLayout:
    layout = make_layout(anchors, is_valid, position_ids, block_size)
    shorter = torch.maximum(layout.context_stop - 1, layout.context_start)
    return layout._replace(context_stop=shorter)


def train_on_hints(shift: int, num_steps: int) -> StepFigures:
    """Train on random tokens whose feature at p is the embedding of token p + shift; return the
    figures over fresh rows."""
    num_tokens, vocab_size, width = 64, 17, 32
    spec = make_spec(
        num_layers=1, block_size=2, hidden_size=width, intermediate_size=64, num_heads=4,
        num_kv_heads=4, vocab_size=vocab_size, target_layer_ids=(1,), mask_token_id=16,
    )  # fmt: skip
    drafter = DFlashDrafter(spec)
    random_init(drafter, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(5.0 if parameter.ndim == 2 else 1.0)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab_size, width, generator=generator)
    hinted = objective_of(
        drafter, num_anchors=48, embedding=embedding, head=embedding, loss_chunk_rows=64
    )
    optimizer = torch.optim.Adam(drafter.parameters(), lr=4e-3)
    total = torch.zeros(0)
    for step in range(num_steps):
        text = torch.randint(0, vocab_size - 1, (num_tokens + shift,), generator=generator)
        row = StagedRow(
            token_ids=text[:num_tokens].to(torch.int32),
            document_ids=torch.zeros(num_tokens, dtype=torch.int32),
            position_ids=torch.arange(num_tokens, dtype=torch.int32),
            loss_mask=(torch.arange(num_tokens) > 0).to(torch.uint8),
            aux_hidden_states=embedding[text[shift:]],
            draw=torch.tensor([0, step, 0]),
        )
        loss, sums = hinted(row)
        optimizer.zero_grad()
        (loss / sums[1]).backward()
        optimizer.step()
        total = sums if step <= num_steps - 10 else total + sums  # the last ten rows
    return unpack_sums(total.tolist())


def test_labels_that_the_last_visible_feature_names_are_learned_wholly() -> None:
    # Slot 1 of anchor a is token a + 1, which the feature at a - 1, the last visible one, names.
    assert train_on_hints(shift=2, num_steps=300).acceptance_rate_at == (1.0,)


def test_labels_that_only_the_anchors_own_feature_names_stay_unknown() -> None:
    # Token a + 1 is named by the feature at a alone, which decoding does not have.
    figures = train_on_hints(shift=1, num_steps=150)
    assert figures.acceptance_rate_at[0] < 0.2
    assert figures.loss > 2.5


def test_an_anchors_own_feature_that_is_let_in_shows_as_knowledge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The test above sees a mask that is one too wide, and the first one a mask that is too narrow.
    monkeypatch.setattr(objective, "make_layout", layout_that_lets_the_anchors_feature_in)
    assert train_on_hints(shift=1, num_steps=300).acceptance_rate_at == (1.0,)
    monkeypatch.setattr(objective, "make_layout", layout_that_hides_the_last_feature)
    assert train_on_hints(shift=2, num_steps=150).acceptance_rate_at[0] < 0.2
