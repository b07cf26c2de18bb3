"""A batch of answers equals what each prompt alone gets, token for token, greedy or sampled."""

import threading

import pytest
import torch

from common.config.shared import TargetTable
from common.target.features import FeatureTap, run_packed
from common.target.loading import load_target
from common.target.sampling import draw_uniforms
from services.target_server.generation import AnswerWriter, Request
from services.target_server.generation_config import GenerationTable
from services.target_server.sampling import choose
from tests.targets import VOCAB_SIZE, make_tiny_target

NEVER = threading.Event()
LENGTHS = (3, 40, 17, 1, 40, 8)


def load(folder, family, **overrides):
    path = make_tiny_target(folder / family, family, **overrides)
    return load_target(TargetTable(model=str(path), dtype="float32"), "cpu")


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_5"])
def model(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(tmp_path_factory.mktemp("target"), "llama")


def prompts(lengths=LENGTHS):
    chooser = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, 250, (n,), generator=chooser).tolist() for n in lengths]


def requests(max_new_tokens=12, lengths=LENGTHS):
    return [Request(ids, number, max_new_tokens) for number, ids in enumerate(prompts(lengths))]


def greedy(model, token_ids, limit):
    """Decode one sequence without cache or padding, to an end of turn or the limit."""
    ends = {model.config.eos_token_id}
    written = []
    while len(written) < limit and not ends & set(written):
        with torch.no_grad():
            logits = model(torch.tensor([token_ids + written]), use_cache=False).logits
        written.append(logits[0, -1].argmax().item())
    return written


def test_a_batch_equals_decoding_each_prompt_alone(model):
    writer = AnswerWriter(model, GenerationTable())
    for _ in range(2):  # the second time over the first one's cache
        answers = writer.answer(requests(), NEVER)
        for request, answer in zip(requests(), answers, strict=True):
            assert answer.token_ids == greedy(model, request.token_ids, 12)


def test_a_cache_that_held_a_longer_batch_leaves_no_trace(model):
    writer = AnswerWriter(model, GenerationTable())
    writer.answer(requests(lengths=(200, 180)), NEVER)
    small = requests(lengths=(5, 9))
    answers = writer.answer(small, NEVER)
    assert [a.token_ids for a in answers] == [greedy(model, r.token_ids, 12) for r in small]


def test_a_sliding_window_is_kept(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    model = load(tmp_path, "qwen3", **window)
    answers = AnswerWriter(model, GenerationTable()).answer(requests(), NEVER)
    expected = [greedy(model, request.token_ids, 12) for request in requests()]
    assert [answer.token_ids for answer in answers] == expected


def test_each_row_stops_at_its_own_end_or_limit(llama):
    asked = [Request(ids, 0, 4 + 3 * number) for number, ids in enumerate(prompts())]
    plain = [greedy(llama, request.token_ids, request.max_new_tokens) for request in asked]
    # A token that ends some rows early and that others never write.
    end = plain[-1][2]
    llama.generation_config.eos_token_id = [end, 1]
    try:
        answers = AnswerWriter(llama, GenerationTable()).answer(asked, NEVER)
    finally:
        llama.generation_config.eos_token_id = llama.config.eos_token_id
    reasons = set()
    for answer, request, alone in zip(answers, asked, plain, strict=True):
        stop = next((i for i, token in enumerate(alone) if token in (end, 1)), None)
        expected = alone if stop is None else alone[: stop + 1]
        assert answer.token_ids == expected
        is_cut = answer.token_ids[-1] not in (end, 1)
        assert answer.finish_reason == ("length" if is_cut else "stop")
        assert not is_cut or len(answer.token_ids) == request.max_new_tokens
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_neighbours(llama):
    table = GenerationTable(temperature=1.5, top_p=0.95)
    together = AnswerWriter(llama, table).answer(requests(20), NEVER)
    writer = AnswerWriter(llama, table)
    alone = [writer.answer([request], NEVER)[0] for request in reversed(requests(20))]
    assert together == alone[::-1]
    others = [Request(r.token_ids, r.seed + 100, 20) for r in requests(20)]
    assert writer.answer(others, NEVER) != together


def test_a_stop_ends_a_batch_without_answers(llama):
    stop = threading.Event()
    stop.set()
    assert AnswerWriter(llama, GenerationTable()).answer(requests(), stop) is None


def test_a_tap_sees_nothing_of_the_answers_and_works_behind_them(llama):
    ids, positions = torch.arange(3, 20), torch.arange(17)
    with FeatureTap(llama, (1, 3)) as tap:
        before = run_packed(llama, tap, ids, positions)
        AnswerWriter(llama, GenerationTable(), tap).answer(requests(3), NEVER)
        assert not tap._kept
        assert torch.equal(run_packed(llama, tap, ids, positions), before)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.6, 0), (1.0, 3), (0.7, 4)])
def test_sampled_shares_are_those_of_the_distribution(top_p, top_k):
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    count = 20_000
    uniforms = draw_uniforms([7], count)[0]
    table = GenerationTable(temperature=0.8, top_p=top_p, top_k=top_k)
    chosen = choose(logits.expand(count, -1), uniforms, table)
    found = torch.bincount(chosen, minlength=VOCAB_SIZE) / count
    assert (found - expected_shares(logits / 0.8, top_p, top_k)).abs().max() < 0.015


def expected_shares(logits, top_p, top_k):
    """The rule by a plain loop: likeliest first, until k tokens or p of the mass are in."""
    order = logits.argsort(descending=True).tolist()[: top_k or None]
    shares = torch.zeros_like(logits)
    shares[order] = logits[order].softmax(-1)
    total = 0.0
    for token in order:
        share = shares[token].item()
        if total >= top_p:
            shares[token] = 0.0
        total += share
    return shares / shares.sum()
