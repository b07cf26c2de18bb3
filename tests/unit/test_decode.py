"""Speculative decoding writes the target's own text, and the replay walk retraces it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from common.config.shared import TargetTable
from common.drafters.dflash.config import SLIDING_ATTENTION, DrafterSpec
from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.metrics import replay_walk
from common.drafters.dflash.model import DFlashDrafter
from common.errors import CaptureMismatchError, ConfigError
from common.target.features import FeatureTap
from common.target.loading import load_target
from services.evaluator.decode import (
    CachedTarget,
    GreedyProposer,
    SpeculativeText,
    TextLimit,
    check_can_crop,
    decode_plainly,
    decode_speculatively,
)
from services.evaluator.replay import Replay, ReplayWalker
from services.evaluator.ties import find_difference
from tests.drafters import make_drafter, make_spec
from tests.targets import NUM_LAYERS, VOCAB_SIZE, make_tiny_target

LAYER_IDS = (1, 3)
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
    return DraftContext(
        drafter.eval().requires_grad_(False),
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )


def decode_with(
    model: PreTrainedModel, proposer: object, prompt: list[int], limit: TextLimit
) -> SpeculativeText:
    with FeatureTap(model, LAYER_IDS) as tap:
        return decode_speculatively(
            CachedTarget(model), tap.aux_hidden_states, proposer, prompt, limit
        )


def plain_ids(model: PreTrainedModel, prompt: list[int], limit: TextLimit) -> list[int]:
    """Decode a text, once: it is greedy."""
    key = (model, tuple(prompt), limit)
    if key not in PLAIN:
        PLAIN[key] = decode_plainly(CachedTarget(model), prompt, limit).token_ids
    return list(PLAIN[key])


def budget(max_new_tokens: int, *stop_token_ids: int) -> TextLimit:
    return TextLimit(frozenset(stop_token_ids), max_new_tokens)


class ScriptedProposer:
    """Drafts from a known answer, with every slot from `num_right` on made wrong."""

    def __init__(
        self, prompt: list[int], answer: list[int], block_size: int, num_right: int
    ) -> None:
        self._text = [*prompt, *answer, *[0] * block_size]
        self._block_size = block_size
        self._num_right = num_right
        self.num_tokens = 0

    def append(self, aux_hidden_states: Tensor) -> None:
        self.num_tokens += len(aux_hidden_states)

    def draft(self, anchor_token_id: Tensor, anchor: Tensor) -> Tensor:
        start = int(anchor)
        assert int(anchor_token_id) == self._text[start]
        tokens = torch.tensor(self._text[start + 1 : start + self._block_size])
        tokens[self._num_right :] = (tokens[self._num_right :] + 1) % VOCAB_SIZE
        return tokens


def emitted(text: SpeculativeText) -> list[int]:
    return [block.num_emitted for block in text.blocks]


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
        proposer = GreedyProposer(fresh_context(model, drafter))
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
    assert [len(block.draft_token_ids) for block in text.blocks] == [7, 7]


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
    text = decode_with(model, GreedyProposer(fresh_context(model, drafter)), PROMPT, limit)
    assert (text.token_ids, text.blocks) == (first, [])
    assert walk(model, drafter, PROMPT, text) == Replay([], 0, 0)


def test_context_that_does_not_end_before_its_anchor_is_refused(model: PreTrainedModel) -> None:
    proposer = ScriptedProposer(PROMPT, [0] * 20, block_size=4, num_right=0)
    proposer.num_tokens = 1
    with pytest.raises(CaptureMismatchError, match="holds 8 positions and the target's cache 7"):
        decode_with(model, proposer, PROMPT, budget(20))


def walk(
    model: PreTrainedModel, drafter: DFlashDrafter, prompt: list[int], text: SpeculativeText
) -> Replay:
    with FeatureTap(model, LAYER_IDS) as tap:
        walker = ReplayWalker(model, tap, tolerance=1e-4, batch=7)
        return walker.walk(fresh_context(model, drafter), prompt, text.token_ids, text.blocks)


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
        proposer = GreedyProposer(fresh_context(model, drafter))
        text = decode_with(model, proposer, prompt, limit)
        replay = walk(model, drafter, prompt, text)
        assert replay == Replay(emitted(text), num_ties=0, num_differences=0)
        if prompt is PROMPT:
            assert len(text.blocks) < len(text.token_ids) / 1.5, "some drafts must be right"


def test_replay_counts_drafts_that_decoding_did_not_make(model: PreTrainedModel) -> None:
    drafter = make_drafter(spec_for(model))
    proposer = GreedyProposer(fresh_context(model, drafter))
    text = decode_with(model, proposer, PROMPT, budget(12))
    text.blocks[2].draft_token_ids[1] ^= 1
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
        check_can_crop(Qwen3NextForCausalLM(config))


def test_walk_over_prefix_lengths_steps_by_prefix_and_bonus() -> None:
    assert replay_walk([2, 9, 9, 0, 1, 9, 9, 9], num_tokens=8) == [3, 1, 2, 1]
