"""At temperature 1 the text that is emitted has the target's own distribution, whatever is drafted."""

import threading
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from common.target.features import FeatureTap
from services.evaluator import verify
from services.evaluator.decode import BatchDecoder, Request, TextLimit
from services.evaluator.passes import Passes, Proposer

VOCAB_SIZE = 5
LENGTH = 3
NUM_SAMPLES = 4096
PROMPT = [1, 4, 2]
# 99.9 % of chi-square with 5**3 - 1 degrees of freedom lie below.
HIGHEST_STATISTIC = 181.0


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.25,
        eos_token_id=None, bos_token_id=None, pad_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight *= 0.3  # each text is likely enough to be counted
    return model


class BlurredTarget:
    """Drafts of the target's own distributions behind the prompt and the anchor, made wrong by noise."""

    block_size = 4

    def __init__(self, model: PreTrainedModel, noise: float) -> None:
        self._model = model
        chooser = torch.Generator().manual_seed(5)
        self._noise = noise * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=chooser)

    def append(self, aux_hidden_states: Tensor, rows: Tensor, positions: Tensor) -> None:
        pass

    def propose(self, anchor_token_ids: Tensor, anchors: Tensor, num_columns: int) -> Tensor:
        text = torch.cat(
            [torch.tensor(PROMPT).expand(len(anchors), -1), anchor_token_ids[:, None]], 1
        )
        slots = []
        for _ in range(self.block_size - 1):
            logits = self._model(input_ids=text, use_cache=False).logits[:, -1]
            slots.append(logits + self._noise[text[:, -1]])
            text = torch.cat([text, slots[-1].argmax(-1, keepdim=True)], 1)
        return torch.stack(slots, 1)

    def move(self, source: int, to: int) -> None:
        pass


def expected_shares(model: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """Return the joint distribution of the first tokens, by the target alone."""
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
    prompts = torch.tensor(PROMPT).expand(len(texts), -1)
    logits = model(input_ids=torch.cat([prompts, texts], 1), use_cache=False).logits
    shares = logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)
    joint = shares.gather(-1, texts[..., None])[..., 0].prod(-1)
    return {tuple(text): share for text, share in zip(texts.tolist(), joint.tolist(), strict=True)}


def sample(model: PreTrainedModel, proposer: Proposer | None) -> tuple[Counter, float]:
    """Return the first tokens of many answers, and the acceptance length behind the first."""
    limit = TextLimit(frozenset(), LENGTH)
    requests = [Request(PROMPT, seed) for seed in range(NUM_SAMPLES)]
    with FeatureTap(model, (0,)) as tap:
        passes = Passes(model, num_rows=256, num_columns=64, tap=tap, proposer=proposer)
        texts = BatchDecoder(passes, limit, is_sampled=True).decode(requests, threading.Event())
    assert texts is not None
    emitted = [p.num_emitted for text in texts for p in text.passes]
    counts = Counter(tuple(text.token_ids) for text in texts)
    return counts, sum(emitted) / len(emitted)


def statistic(counts: Counter, shares: dict[tuple[int, ...], float]) -> float:
    """Return chi-square; every cell must be expected often enough for it."""
    expected = {text: share * NUM_SAMPLES for text, share in shares.items()}
    assert min(expected.values()) > 5
    return sum((counts[text] - n) ** 2 / n for text, n in expected.items())


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.1, 1.8, 2.0), (4.0, 1.1, 1.4)], ids=["good", "bad"]
)
def test_sampled_text_has_the_targets_distribution(
    model: PreTrainedModel, noise: float, least: float, most: float
) -> None:
    counts, acceptance_length = sample(model, BlurredTarget(model, noise))
    assert least < acceptance_length < most, "two tokens behind the first: at most 2 a pass"
    assert statistic(counts, expected_shares(model)) < HIGHEST_STATISTIC


def test_plain_sampling_has_the_targets_distribution(model: PreTrainedModel) -> None:
    counts, acceptance_length = sample(model, None)
    assert acceptance_length == 1
    assert statistic(counts, expected_shares(model)) < HIGHEST_STATISTIC


def test_a_sampler_without_the_residual_is_found_out(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skip_residual(p: Tensor, q: Tensor, num_accepted: Tensor) -> Tensor:
        return p[torch.arange(len(p)), num_accepted]

    monkeypatch.setattr(verify, "_shares_behind", skip_residual)
    counts, _ = sample(model, BlurredTarget(model, 4.0))
    assert statistic(counts, expected_shares(model)) > 2 * HIGHEST_STATISTIC


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_neighbours(
    model: PreTrainedModel,
) -> None:
    limit = TextLimit(frozenset(), 12)
    requests = [Request(PROMPT[: 1 + seed % 3], seed) for seed in range(7)]

    def decode(num_rows: int, asked: list[Request]) -> list[list[int]]:
        with FeatureTap(model, (0,)) as tap:
            passes = Passes(
                model, num_rows=num_rows, num_columns=64, tap=tap,
                proposer=BlurredTarget(model, 1.0),
            )  # fmt: skip
            decoder = BatchDecoder(passes, limit, is_sampled=True)
            texts = decoder.decode(asked, threading.Event())
        assert texts is not None
        return [text.token_ids for text in texts]

    together = decode(3, requests)
    assert together == decode(1, requests)
    assert together[::-1] == decode(7, requests[::-1])
    others = [Request(request.token_ids, request.seed + 100) for request in requests]
    assert decode(3, others) != together


def test_equal_distributions_accept_every_draft() -> None:
    chooser = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 4, VOCAB_SIZE, generator=chooser)
    uniforms = torch.rand(64, 7, generator=chooser, dtype=torch.float64)
    drafts = verify.choose_drafts(logits[:, :3], uniforms)
    verdict = verify.verify(drafts, logits, uniforms)
    assert verdict.num_emitted.tolist() == [4] * 64
    assert torch.equal(verdict.token_ids[:, :3], drafts.token_ids)
