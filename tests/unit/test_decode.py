"""Speculative decoding writes the target's own text, and the replay walk retraces it."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from common.config.shared import TargetTable
from common.drafters.dflash.config import SLIDING_ATTENTION, DrafterSpec
from common.drafters.dflash.drafting import DraftContext, DraftRows
from common.drafters.dflash.metrics import replay_walk
from common.drafters.dflash.model import DFlashDrafter
from common.errors import ConfigError
from common.target.features import FeatureTap
from common.target.loading import load_target
from common.target.row_cache import check_can_forget
from services.evaluator.decode import BatchDecoder, Request, Text, TextLimit
from services.evaluator.passes import Passes, Proposer
from services.evaluator.replay import Replay, ReplayWalker
from services.evaluator.ties import find_difference
from tests.drafters import make_drafter, make_spec
from tests.targets import NUM_LAYERS, VOCAB_SIZE, make_tiny_target

LAYER_IDS = (1, 3)
NUM_COLUMNS = 192
PROMPT = [40, 41, 42, 43, 44, 45, 46]
PROMPTS = [PROMPT, list(range(50, 70)), [260, 7, 261, 7], list(range(100, 190))]
PLAIN: dict[tuple[PreTrainedModel, tuple[int, ...], TextLimit], list[int]] = {}
TARGETS = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "sliding": {
        "family": "qwen3",
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    },
}


@pytest.fixture(scope="module", params=TARGETS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_target(folder, **TARGETS[request.param])
    return load_target(TargetTable(model=str(folder), dtype="float32"), "cpu")


def spec_for(model: PreTrainedModel, **changes: object) -> DrafterSpec:
    values = {
        "hidden_size": model.config.hidden_size,
        "vocab_size": VOCAB_SIZE,
        "num_target_layers": NUM_LAYERS,
        "target_layer_ids": LAYER_IDS,
        "mask_token_id": VOCAB_SIZE - 1,
    }
    return make_spec(**values | changes)


def fresh_context(model: PreTrainedModel, drafter: DFlashDrafter) -> DraftContext:
    return DraftContext(drafter, *tables(model))


def tables(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def drafting(model: PreTrainedModel, drafter: DFlashDrafter, num_rows: int = 1) -> DraftRows:
    return DraftRows(drafter, *tables(model), num_rows=num_rows, num_columns=NUM_COLUMNS)


def decode_all(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    limit: TextLimit,
    proposer: Proposer | None = None,
    num_rows: int = 1,
) -> list[Text]:
    requests = [Request(prompt) for prompt in prompts]
    with FeatureTap(model, LAYER_IDS) as tap:
        passes = Passes(
            model, num_rows=num_rows, num_columns=NUM_COLUMNS, tap=tap, proposer=proposer
        )
        texts = BatchDecoder(passes, limit).decode(requests, threading.Event())
    assert texts is not None
    return texts


def decode_with(
    model: PreTrainedModel, proposer: Proposer, prompt: list[int], limit: TextLimit
) -> Text:
    return decode_all(model, [prompt], limit, proposer)[0]


def plain_ids(model: PreTrainedModel, prompt: list[int], limit: TextLimit) -> list[int]:
    """Decode a text, once: it is greedy."""
    key = (model, tuple(prompt), limit)
    if key not in PLAIN:
        PLAIN[key] = decode_all(model, [prompt], limit)[0].token_ids
    return list(PLAIN[key])


def budget(max_new_tokens: int, *stop_token_ids: int) -> TextLimit:
    return TextLimit(frozenset(stop_token_ids), max_new_tokens)


class ScriptedProposer:
    """Drafts from a known answer, with every slot from `num_right` on made wrong."""

    def __init__(
        self, prompt: list[int], answer: list[int], block_size: int, num_right: int
    ) -> None:
        self._text = [*prompt, *answer, *[0] * block_size]
        self.block_size = block_size
        self._num_right = num_right
        self._positions: set[int] = set()

    def append(self, aux_hidden_states: Tensor, rows: Tensor, positions: Tensor) -> None:
        assert aux_hidden_states.shape[:2] == positions.shape
        self._positions |= set(positions.flatten().tolist())

    def propose(self, anchor_token_ids: Tensor, anchors: Tensor, num_columns: int) -> Tensor:
        start = int(anchors)
        assert int(anchor_token_ids) == self._text[start]
        assert set(range(start)) <= self._positions, "the context reaches up to the anchor"
        tokens = torch.tensor(self._text[start + 1 : start + self.block_size])
        tokens[self._num_right :] = (tokens[self._num_right :] + 1) % VOCAB_SIZE
        return torch.nn.functional.one_hot(tokens, VOCAB_SIZE)[None].float()

    def move(self, source: int, to: int) -> None:
        raise AssertionError("one row is never moved")


def drafts(text: Text) -> list[object]:
    return [each.draft_token_ids for each in text.passes]


def emitted(text: Text) -> list[int]:
    return [each.num_emitted for each in text.passes]


def test_plain_decoding_equals_greedy_generation(model: PreTrainedModel) -> None:
    end = model.generation_config.eos_token_id
    for prompt in PROMPTS:
        expected = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=GenerationConfig(
                max_new_tokens=20, do_sample=False, eos_token_id=end, pad_token_id=end
            ),
        )[0, len(prompt) :]
        assert plain_ids(model, prompt, budget(20, end)) == expected.tolist()


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_speculative_text_equals_plain_text(model: PreTrainedModel, block_size: int) -> None:
    drafter = make_drafter(spec_for(model, block_size=block_size))
    for prompt in PROMPTS:
        proposer = drafting(model, drafter)
        text = decode_with(model, proposer, prompt, budget(24))
        assert text.token_ids == plain_ids(model, prompt, budget(24))
        assert sum(emitted(text)) == len(text.token_ids) - 1


@pytest.mark.parametrize("num_right", range(8))
def test_text_does_not_depend_on_how_many_drafts_are_right(
    model: PreTrainedModel, num_right: int
) -> None:
    expected = plain_ids(model, PROMPT, budget(33))
    longer = plain_ids(model, PROMPT, budget(45))
    proposer = ScriptedProposer(PROMPT, longer, block_size=8, num_right=num_right)
    text = decode_with(model, proposer, PROMPT, budget(33))
    assert text.token_ids == expected
    assert set(emitted(text)[:-1]) == {num_right + 1}


def test_drafts_that_are_all_right_emit_whole_blocks(model: PreTrainedModel) -> None:
    answer = plain_ids(model, PROMPT, budget(41))
    proposer = ScriptedProposer(PROMPT, answer, block_size=8, num_right=7)
    text = decode_with(model, proposer, PROMPT, budget(41))
    assert emitted(text) == [8] * 5, "acceptance length is S"


def test_budget_cuts_the_last_block_which_still_has_all_its_slots(model: PreTrainedModel) -> None:
    answer = plain_ids(model, PROMPT, budget(30))
    proposer = ScriptedProposer(PROMPT, answer, block_size=8, num_right=7)
    text = decode_with(model, proposer, PROMPT, budget(13))
    assert text.token_ids == answer[:13]
    assert emitted(text) == [8, 4]
    assert [len(each.draft_token_ids) for each in text.passes] == [7, 7]


def test_stop_token_inside_a_block_ends_the_answer_behind_it(model: PreTrainedModel) -> None:
    answer = plain_ids(model, PROMPT, budget(30))
    place = next(i for i in range(3, 30) if answer[i] not in answer[:i])
    limit = budget(30, answer[place])
    proposer = ScriptedProposer(PROMPT, answer, block_size=16, num_right=15)
    text = decode_with(model, proposer, PROMPT, limit)
    assert text.token_ids == answer[: place + 1] == plain_ids(model, PROMPT, limit)
    assert place % 15, "the stop token is not the last of its block"


def test_answer_that_is_only_a_stop_token_needs_no_block(model: PreTrainedModel) -> None:
    first = plain_ids(model, PROMPT, budget(1))
    drafter = make_drafter(spec_for(model))
    limit = budget(20, *first)
    text = decode_with(model, drafting(model, drafter), PROMPT, limit)
    assert (text.token_ids, text.passes) == (first, [])
    assert walk(model, drafter, PROMPT, text) == Replay([], 0, 0)


def test_batches_equal_one_prompt_at_a_time(model: PreTrainedModel) -> None:
    """More prompts than rows, other lengths, and ends at other times."""
    drafter = make_drafter(spec_for(model, block_size=5))
    learn_text(model, drafter, PROMPT)
    asked = [*PROMPTS, PROMPT[:3], PROMPT, *PROMPTS[1:3]]
    first = [plain_ids(model, prompt, budget(1))[0] for prompt in asked]
    stops = (first[2], plain_ids(model, PROMPTS[3], budget(9))[8])
    for limit in (budget(24), budget(24, *stops)):
        ones = {
            tuple(prompt): decode_with(model, drafting(model, drafter), prompt, limit)
            for prompt in asked
        }
        for num_rows in (2, 3, 8):
            rows = drafting(model, drafter, num_rows)
            together = decode_all(model, asked, limit, rows, num_rows)
            plain = decode_all(model, asked, limit, num_rows=num_rows)
            for prompt, text, alone in zip(asked, together, plain, strict=True):
                one = ones[tuple(prompt)]
                assert text.token_ids == one.token_ids == alone.token_ids, num_rows
                assert emitted(text) == emitted(one), num_rows
                assert drafts(text) == drafts(one), num_rows
            assert max(map(len, map(emitted, together))) > 3


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3", "qwen3_moe", "smollm3"]
)
def test_rows_of_each_family_equal_decoding_without_a_cache(tmp_path: Path, family: str) -> None:
    model = load_target(
        TargetTable(model=str(make_tiny_target(tmp_path, family)), dtype="float32"), "cpu"
    )
    prompts = [PROMPTS[0], PROMPTS[3][:40], PROMPTS[2]]
    for text, prompt in zip(
        decode_all(model, prompts, budget(12), num_rows=2), prompts, strict=True
    ):
        written: list[int] = []
        with torch.no_grad():
            while len(written) < 12:
                ids = torch.tensor([prompt + written])
                written.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        assert text.token_ids == written


def test_a_stop_ends_decoding_without_texts(model: PreTrainedModel) -> None:
    stop = threading.Event()
    stop.set()
    passes = Passes(model, num_rows=2, num_columns=NUM_COLUMNS)
    assert BatchDecoder(passes, budget(9)).decode([Request(PROMPT)], stop) is None


def test_warming_up_leaves_no_trace(model: PreTrainedModel) -> None:
    requests = [Request(prompt) for prompt in PROMPTS]
    decoder = BatchDecoder(Passes(model, num_rows=3, num_columns=NUM_COLUMNS), budget(12))
    decoder.warm_up(requests[::-1], 30)
    texts = decoder.decode(requests, threading.Event())
    assert texts is not None
    assert [text.token_ids for text in texts] == [
        plain_ids(model, prompt, budget(12)) for prompt in PROMPTS
    ]


def test_seconds_of_a_pass_are_shared_by_its_rows(model: PreTrainedModel) -> None:
    start = time.perf_counter()
    texts = decode_all(model, PROMPTS, budget(12), num_rows=4)
    assert 0 < sum(text.seconds for text in texts) < time.perf_counter() - start
    assert len({text.seconds for text in texts}) == 1, "they ran side by side from first to last"


def walk(model: PreTrainedModel, drafter: DFlashDrafter, prompt: list[int], text: Text) -> Replay:
    with FeatureTap(model, LAYER_IDS) as tap:
        walker = ReplayWalker(model, tap, tolerance=1e-4, batch=7)
        return walker.walk(fresh_context(model, drafter), prompt, text.token_ids, text.passes)


def learn_text(model: PreTrainedModel, drafter: DFlashDrafter, prompt: list[int]) -> None:
    """Overfit a drafter to the target's greedy answer, by the training objective."""
    from common.drafters.dflash.objective import DFlashObjective, StagedRow

    ids = torch.tensor(prompt + plain_ids(model, prompt, budget(40)))
    with FeatureTap(model, LAYER_IDS) as tap, torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
        features = tap.aux_hidden_states().clone()
    objective = DFlashObjective(
        drafter, embedding=model.get_input_embeddings().weight.detach(),
        head=model.get_output_embeddings().weight.detach(), num_anchors=20, max_documents=1,
        loss_chunk_rows=64, backend="dense",
    )  # fmt: skip
    row = StagedRow(
        token_ids=ids.to(torch.int32),
        document_ids=torch.zeros(len(ids), dtype=torch.int32),
        position_ids=torch.arange(len(ids), dtype=torch.int32),
        loss_mask=(torch.arange(len(ids)) >= len(prompt)).to(torch.uint8),
        aux_hidden_states=features,
        draw=torch.tensor([0, 0, 0]),
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for visit in range(60):
        row.draw[2] = visit
        loss, sums = objective(row)
        optimizer.zero_grad()
        (loss / sums[1]).backward()
        optimizer.step()


@pytest.mark.parametrize("sliding", [False, True])
def test_replay_walk_equals_live_decoding(model: PreTrainedModel, sliding: bool) -> None:
    changes = {"layer_types": (SLIDING_ATTENTION,) * 2, "sliding_window": 9} if sliding else {}
    drafter = make_drafter(spec_for(model, block_size=6, **changes))
    learn_text(model, drafter, PROMPT)
    for prompt, limit in ((PROMPT, budget(40)), (PROMPT, budget(23)), (PROMPTS[1], budget(40))):
        proposer = drafting(model, drafter)
        text = decode_with(model, proposer, prompt, limit)
        replay = walk(model, drafter, prompt, text)
        assert replay == Replay(emitted(text), num_ties=0, num_differences=0)
        if prompt is PROMPT:
            assert len(text.passes) < len(text.token_ids) / 1.5, "some drafts must be right"


def test_replay_counts_drafts_that_decoding_did_not_make(model: PreTrainedModel) -> None:
    drafter = make_drafter(spec_for(model))
    proposer = drafting(model, drafter)
    text = decode_with(model, proposer, PROMPT, budget(12))
    text.passes[2].draft_token_ids[1] ^= 1
    assert walk(model, drafter, PROMPT, text).num_differences == 1


def test_answers_that_part_at_equal_logits_are_a_float_tie(model: PreTrainedModel) -> None:
    plain = plain_ids(model, PROMPT, budget(10))
    other = [*plain[:4], (plain[4] + 1) % VOCAB_SIZE, *plain[5:]]
    mismatch = find_difference(model, PROMPT, plain, other, tolerance=1e-4)
    assert mismatch is not None
    assert (mismatch.position, mismatch.expected, mismatch.got) == (4, plain[4], other[4])
    assert not mismatch.is_tie
    tie = find_difference(model, PROMPT, plain, other, tolerance=mismatch.gap * 1.01)
    assert tie is not None
    assert tie.is_tie
    assert find_difference(model, PROMPT, plain, list(plain), tolerance=1e-4) is None


def test_answer_that_ends_early_is_a_mismatch(model: PreTrainedModel) -> None:
    plain = plain_ids(model, PROMPT, budget(10))
    difference = find_difference(model, PROMPT, plain, plain[:7], tolerance=1.0)
    assert difference is not None
    assert (difference.position, difference.got, difference.is_tie) == (7, None, False)


def test_target_whose_state_cannot_be_rolled_back_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="layers of linear_attention"):
        check_can_forget(Qwen3NextForCausalLM(config))


def test_walk_over_prefix_lengths_steps_by_prefix_and_bonus() -> None:
    assert replay_walk([2, 9, 9, 0, 1, 9, 9, 9], num_tokens=8) == [3, 1, 2, 1]
