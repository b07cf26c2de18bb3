"""Sums of a step, their ratios, and acceptance as decoding counts it."""

import random

import pytest
import torch

from common.drafters.dflash.metrics import (
    NUM_SCALARS,
    pack_sums,
    replay_passes,
    replay_walk,
    unpack_sums,
)

CORRECT = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
SUPERVISED = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
WEIGHTS = SUPERVISED * torch.tensor([1.0, 0.5, 0.25])


def packed(loss: float = 6.0) -> list[float]:
    return pack_sums(torch.tensor(loss), WEIGHTS, CORRECT, SUPERVISED, torch.tensor(2)).tolist()


def test_figures_count_supervised_slots_alone() -> None:
    figures = unpack_sums(packed())
    assert figures.loss == pytest.approx(6.0 / 5.0)
    assert figures.acceptance_rate_at == pytest.approx((2 / 3, 2 / 3, 1 / 2))
    assert figures.num_blocks == 3


def test_prefix_ends_at_the_first_wrong_or_unsupervised_slot() -> None:
    # Prefixes of the three supervised blocks: 2, 1, 0.
    assert unpack_sums(packed()).accepted_prefix_length == pytest.approx(1.0)


def test_sums_of_rows_add_before_any_division() -> None:
    doubled = [2 * value for value in packed()]
    once, twice = unpack_sums(packed()), unpack_sums(doubled)
    assert once.loss == twice.loss
    assert once.acceptance_rate_at == twice.acceptance_rate_at
    assert twice.num_blocks == 2 * once.num_blocks


def test_step_without_supervision_has_zeros_and_no_division_by_zero() -> None:
    nothing = torch.zeros_like(SUPERVISED)
    sums = pack_sums(torch.tensor(0.0), nothing.float(), CORRECT, nothing, torch.tensor(0))
    assert len(sums) == NUM_SCALARS + 2 * 3
    figures = unpack_sums(sums.tolist())
    assert (figures.loss, figures.accepted_prefix_length, figures.num_blocks) == (0.0, 0.0, 0)
    assert figures.acceptance_rate_at == (0.0, 0.0, 0.0)


def test_sums_do_not_hold_on_to_the_graph() -> None:
    loss = torch.tensor(1.0, requires_grad=True) * 2
    assert not pack_sums(loss, WEIGHTS, CORRECT, SUPERVISED, torch.tensor(2)).requires_grad


def decode(prefix_lengths: list[int], num_tokens: int) -> list[int]:
    """Walk as decoding does, one token at a time."""
    emitted, produced = [], 1
    while produced < num_tokens:
        before = produced
        for _ in range(prefix_lengths[produced - 1] + 1):
            produced += produced < num_tokens
        emitted.append(produced - before)
    return emitted


def test_replay_walk_steps_as_decoding_does() -> None:
    generator = random.Random(0)
    for _ in range(200):
        num_tokens = generator.randint(1, 40)
        prefixes = [generator.randint(0, 7) for _ in range(num_tokens)]
        emitted = replay_walk(prefixes, num_tokens)
        assert emitted == decode(prefixes, num_tokens)
        assert sum(emitted) == num_tokens - 1


def test_replay_walk_of_right_drafts_emits_whole_blocks() -> None:
    assert replay_walk([7] * 17, num_tokens=17) == [8, 8]


def test_replay_walk_of_wrong_drafts_emits_one_token_a_pass() -> None:
    assert replay_walk([0] * 5, num_tokens=5) == [1, 1, 1, 1]


def test_replay_walk_of_one_token_has_no_pass() -> None:
    assert replay_walk([3], num_tokens=1) == []


def test_replay_walk_skips_what_decoding_skips() -> None:
    # The wrong drafts behind tokens 1 and 2 never happen: decoding jumps from token 0 to token 3.
    assert replay_walk([2, 0, 0, 2, 0, 0], num_tokens=7) == [3, 3]


@pytest.mark.parametrize("seed", range(20))
def test_passes_on_the_device_are_those_of_the_walk_over_each_text(seed: int) -> None:
    source = random.Random(seed)
    prefix, last, expected = [], [], []
    while len(prefix) < 90:
        if source.random() < 0.3:  # a prompt: in no text
            last.append(len(last))
            prefix.append(source.randrange(5))
            continue
        length = source.randrange(1, 40)
        lengths = [source.randrange(7) for _ in range(length)]
        expected.append((len(prefix), len(replay_walk(lengths, length))))
        last += [len(prefix) + length - 1] * length
        prefix += lengths
    passes = replay_passes(torch.tensor(prefix), torch.tensor(last)).tolist()
    assert [passes[start] for start, _ in expected] == [count for _, count in expected]
