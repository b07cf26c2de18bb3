"""Anchors: same draw, same anchors; at most A, sorted, inside documents, each document served."""

import pytest
import torch
from torch import Tensor

from common.drafters.dflash.anchors import Anchors, eligible_positions, select_anchors

Row = tuple[Tensor, Tensor]


def make_row(lengths: list[int], num_tokens: int, num_prompt: int = 1) -> Row:
    """Return loss mask and document ids of packed documents."""
    document_ids = torch.full((num_tokens,), -1, dtype=torch.int32)
    loss_mask = torch.zeros(num_tokens, dtype=torch.uint8)
    start = 0
    for index, length in enumerate(lengths):
        document_ids[start : start + length] = index
        loss_mask[start + num_prompt : start + length] = 1
        start += length
    return loss_mask, document_ids


def random_row(length: int, seed: int) -> Row:
    """Return a row of random documents and random supervision, with padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask, document_ids = make_row([], length)
    start = 0
    for index in range(6):
        stop = start + int(torch.randint(1, 2 + length // 4, (), generator=generator))
        document_ids[start : min(stop, length)] = index
        start = stop
    loss_mask[:] = torch.randint(0, 3, (length,), generator=generator) > 0
    loss_mask[document_ids < 0] = 0
    return loss_mask, document_ids


def select(row: Row, num_anchors: int, draw: tuple[int, int, int] = (1, 2, 0)) -> Anchors:
    return select_anchors(*row, torch.tensor(draw), num_anchors, max_documents=8)


def chosen(anchors: Anchors) -> list[int]:
    return anchors.positions[anchors.is_valid].tolist()


def eligible_by_hand(row: Row) -> list[int]:
    loss_mask, document_ids = (part.tolist() for part in row)
    return [
        p
        for p in range(len(loss_mask) - 1)
        if loss_mask[p] and loss_mask[p + 1] and document_ids[p] == document_ids[p + 1] >= 0
    ]


def test_same_draw_gives_the_same_anchors() -> None:
    row = make_row([40, 60, 20], 128)
    first, second = select(row, 24), select(row, 24)
    assert torch.equal(first.positions, second.positions)
    assert torch.equal(first.is_valid, second.is_valid)


@pytest.mark.parametrize("draw", [(7, 2, 0), (1, 3, 0), (1, 2, 1)])
def test_other_seed_sequence_or_visit_gives_other_anchors(draw: tuple[int, int, int]) -> None:
    row = make_row([120], 128)
    assert chosen(select(row, 24)) != chosen(select(row, 24, draw))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 51, 127, 128, 129, 255, 300])
@pytest.mark.parametrize("num_anchors", [1, 5, 17, 400])
def test_anchors_are_eligible_sorted_and_at_most_a(length: int, num_anchors: int) -> None:
    row = random_row(length, seed=length)
    eligible = eligible_by_hand(row)
    anchors = select(row, num_anchors)
    positions = chosen(anchors)
    assert len(anchors.positions) == len(anchors.is_valid) == num_anchors
    assert len(positions) == min(num_anchors, len(eligible))
    assert positions == sorted(set(positions))
    assert set(positions) <= set(eligible)
    assert anchors.is_valid.tolist() == sorted(anchors.is_valid.tolist(), reverse=True)
    assert not anchors.positions[~anchors.is_valid].any()


@pytest.mark.parametrize("length", range(1, 301, 13))
def test_eligible_are_pairs_of_supervised_tokens_of_one_document(length: int) -> None:
    row = random_row(length, seed=1000 + length)
    assert eligible_positions(*row).nonzero().flatten().tolist() == eligible_by_hand(row)


def test_each_document_gets_an_anchor_before_any_gets_two() -> None:
    row = make_row([200, 4, 5, 3, 80], 300)
    documents = row[1]
    for visit in range(20):
        anchors = chosen(select(row, 5, (0, 9, visit)))
        assert documents[anchors].tolist() == [0, 1, 2, 3, 4]


def test_documents_without_an_eligible_position_get_none() -> None:
    row = make_row([30, 2, 30], 64, num_prompt=1)  # the second has one supervised token
    assert set(row[1][chosen(select(row, 40))].tolist()) == {0, 2}


def test_fewer_anchors_than_documents_serve_different_documents() -> None:
    row = make_row([10] * 8, 80)
    for visit in range(10):
        documents = row[1][chosen(select(row, 3, (0, 0, visit)))].tolist()
        assert len(set(documents)) == 3


def test_last_token_of_a_document_is_never_an_anchor() -> None:
    row = make_row([3, 3, 3, 3], 12)
    assert chosen(select(row, 12)) == [1, 4, 7, 10]


def test_all_eligible_positions_are_taken_where_anchors_abound() -> None:
    row = make_row([9, 14], 32)
    assert chosen(select(row, 64)) == eligible_by_hand(row)


def test_row_without_supervision_has_only_invalid_anchors() -> None:
    row = make_row([9, 14], 32)
    row[0].zero_()
    assert not select(row, 8).is_valid.any()


def test_anchors_spread_evenly_over_visits() -> None:
    row = make_row([102], 128)
    counts = torch.zeros(128)
    for visit in range(400):
        counts[chosen(select(row, 10, (3, 4, visit)))] += 1
    counts = counts[eligible_by_hand(row)]
    assert len(counts) == 100
    assert counts.sum() == 4000
    # 40 +- 6 expected; five deviations either way for the largest and smallest of 100.
    assert counts.min() > 10
    assert counts.max() < 70


def test_anchors_do_not_depend_on_padding() -> None:
    short, long = make_row([40, 20], 64), make_row([40, 20], 192)
    assert chosen(select(short, 16)) == chosen(select(long, 16))
