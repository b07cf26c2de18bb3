"""Every tested family on a tiny random model: what drafters read of it is what the model computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.config.shared import TargetTable
from common.drafters.dflash.config import DrafterSpec, DrafterTable, resolve_spec
from common.drafters.dflash.model import DFlashDrafter
from common.errors import ConfigError
from common.target.checks import (
    check_embedding,
    check_features,
    check_head,
    packing_is_isolated,
    tables_differ,
)
from common.target.families import FAMILIES, UNTESTED, fixed_rope
from common.target.features import FeatureTap, decoder_of, run_packed, run_row
from common.target.loading import TargetDescription, describe_target, load_target
from common.target.weights import FrozenTables, load_embedding_and_head
from tests.targets import NUM_LAYERS, VOCAB_SIZE, make_tiny_target

LAYER_IDS = (0, 2, 4)
# Families by the text part of their config, and two that read images too.
TARGETS = {name: name for name in FAMILIES} | {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
SCALED = ("gemma2", "gemma3_text")
SEPARATE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss")
LENGTHS = (23, 1, 9, 30)


class Target(NamedTuple):
    name: str
    table: TargetTable
    description: TargetDescription
    model: PreTrainedModel
    tables: FrozenTables


def load(path: Path, name: str, **settings: Any) -> Target:
    """Save and load a random target whose norms weigh, and heads shift where they can."""
    make_tiny_target(path, name, **settings)
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(path / "model.safetensors")
    for key, value in tensors.items():
        if value.ndim == 1:
            tensors[key] = value + torch.randn(value.shape, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    table = TargetTable(model=str(path), dtype="float32")
    tables = load_embedding_and_head(table, "cpu", torch.float32)
    return Target(name, table, describe_target(table), load_target(table, "cpu"), tables)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp(request.param), request.param)


def documents() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 280, (length,), generator=random) for length in LENGTHS]


def positions(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(len(part)) for part in parts])


def spec_of(target: TargetDescription) -> DrafterSpec:
    table = DrafterTable(num_layers=1, block_size=4)
    return resolve_spec(table, target, target_layer_ids=(1, 3), mask_token_id=290)


def test_the_family_is_that_of_the_text_part(target: Target) -> None:
    assert target.description.model_type == TARGETS[target.name]
    assert target.description.family is FAMILIES[TARGETS[target.name]]


def test_features_are_the_outputs_of_the_chosen_layers(target: Target) -> None:
    (token_ids, *_) = documents()
    with torch.no_grad():
        own = target.model(token_ids[None], output_hidden_states=True, use_cache=False)
    with FeatureTap(target.model, LAYER_IDS) as tap:
        kept = run_packed(target.model, tap, token_ids, torch.arange(len(token_ids)))
        assert all(check.holds for check in check_features(target.model, tap, token_ids))
    expected = torch.cat([own.hidden_states[layer + 1][0] for layer in LAYER_IDS], dim=-1)
    assert torch.equal(kept, expected)


def test_documents_of_a_row_have_the_features_they_have_alone(target: Target) -> None:
    """Packed where the family says so; it does not say so of those whose documents would mix."""
    parts = documents()
    is_packed = target.description.family.is_packed
    assert is_packed == (target.description.model_type not in SEPARATE)
    with FeatureTap(target.model, LAYER_IDS) as tap:
        assert packing_is_isolated(target.model, tap, parts) == is_packed
        row = run_row(
            target.model, tap, torch.cat(parts), positions(parts), is_packed=is_packed
        ).aux_hidden_states
        alone = [run_packed(target.model, tap, part, torch.arange(len(part))) for part in parts]
    torch.testing.assert_close(row, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_a_shared_prefix_another_order_and_a_second_pass_change_no_features(
    target: Target,
) -> None:
    """No state goes from pass to pass, nor from a document to one that begins alike."""
    random = torch.Generator().manual_seed(2)
    prefix, *tails = (
        torch.randint(3, 280, (length,), generator=random) for length in (12, 9, 1, 5)
    )
    parts = [torch.cat([prefix, tail]) for tail in tails]
    is_packed = target.description.family.is_packed
    with FeatureTap(target.model, LAYER_IDS) as tap:
        alone = [run_packed(target.model, tap, part, torch.arange(len(part))) for part in parts]
        for order in ((0, 1, 2), (2, 0, 1), (2, 0, 1)):
            row = [parts[i] for i in order]
            features = run_row(
                target.model, tap, torch.cat(row), positions(row), is_packed=is_packed
            ).aux_hidden_states
            expected = torch.cat([alone[i] for i in order])
            torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


def test_raw_rows_times_the_familys_scale_enter_the_model(target: Target) -> None:
    (token_ids, *_) = documents()
    family = target.description.family
    assert family.scales_embedding == (target.description.model_type in SCALED)
    found = check_embedding(target.model, target.description, target.tables, token_ids)
    assert found.holds
    other = replace(
        target.description, family=replace(family, scales_embedding=not family.scales_embedding)
    )
    assert not check_embedding(target.model, other, target.tables, token_ids).holds


def test_norm_head_and_cap_make_the_models_logits(target: Target) -> None:
    found = check_head(target.model, target.description, target.tables, documents())
    assert found.num_positions == sum(LENGTHS)
    assert found.num_equal >= found.num_positions - 1
    assert found.holds
    assert found.is_whole
    assert found.error < 1e-4
    family = target.description.family
    forms = {"weight": "one_plus_weight", "one_plus_weight": "weight", "layer_norm": "weight"}
    other = replace(target.description, family=replace(family, norm=forms[family.norm]))
    found = check_head(target.model, other, target.tables, documents())
    assert not found.holds
    assert not found.is_whole


def test_the_tables_in_the_files_are_the_models(target: Target) -> None:
    assert tables_differ(target.model, target.tables) is None
    assert target.tables.head is not target.tables.embedding
    assert target.tables.head.shape == (VOCAB_SIZE, 32)


def test_a_drafter_takes_its_shape_from_the_target(target: Target) -> None:
    spec = spec_of(target.description)
    assert (spec.hidden_size, spec.head_dim, spec.num_kv_heads) == (32, 8, 2)
    assert not set(spec.rope_parameters) & {"partial_rotary_factor", "mrope_section"}
    drafter = DFlashDrafter(spec)
    # Frequencies for half a head turn a whole one.
    assert len(drafter.inv_freq) == spec.head_dim // 2


def test_last_layer_is_normed_in_rows_that_carry_it(target: Target) -> None:
    (token_ids, *_) = documents()
    with FeatureTap(target.model, (1,), keep_last_normed=True) as tap:
        run_packed(target.model, tap, token_ids, torch.arange(len(token_ids)))
        kept = tap.last_hidden_states_normed()
    with torch.no_grad():
        own = decoder_of(target.model)(token_ids[None], use_cache=False).last_hidden_state[0]
    assert torch.equal(kept, own)


@pytest.mark.parametrize("name", TARGETS)
def test_a_tied_head_is_the_embedding(name: str, tmp_path: Path) -> None:
    target = load(tmp_path, name, tie_word_embeddings=True)
    assert target.tables.head is target.tables.embedding
    assert tables_differ(target.model, target.tables) is None
    assert check_head(target.model, target.description, target.tables, documents()).holds


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_a_cap_on_logits_is_the_familys_config_and_counts(name: str, tmp_path: Path) -> None:
    target = load(tmp_path, name, final_logit_softcapping=3.0)
    assert target.description.logit_softcap == 3.0
    found = check_head(target.model, target.description, target.tables, documents())
    assert found.holds
    assert found.is_whole
    uncapped = replace(target.description, logit_softcap=0.0)
    found = check_head(target.model, uncapped, target.tables, documents())
    assert found.num_equal >= found.num_positions - 1  # a cap changes no choice
    assert not found.is_whole


def test_caps_on_attention_scores_are_not_left_out(tmp_path: Path) -> None:
    settings = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}
    target = load(tmp_path, "gemma2", **settings)
    assert target.description.attention == "eager"
    (token_ids, *_) = documents()
    by_sdpa = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    with torch.no_grad():
        own = target.model(token_ids[None], use_cache=False).logits
        without = by_sdpa(token_ids[None], use_cache=False).logits
    assert (own - without).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "mistral", "phi3"])
def test_windows_reach_into_features(name: str, tmp_path: Path) -> None:
    """The tiny targets' window is shorter than the documents, so that leaving it out would show."""
    (token_ids, *_) = documents()
    features = []
    for window in (8, 64):
        target = load(tmp_path / str(window), name, sliding_window=window)
        with FeatureTap(target.model, LAYER_IDS) as tap:
            features.append(run_packed(target.model, tap, token_ids, torch.arange(len(token_ids))))
    assert torch.equal(features[0][:8], features[1][:8])
    assert (features[0][-1] - features[1][-1]).abs().max() > 0.01


ROTARY: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "llama",
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    ),
    (
        "gemma3_text",
        {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
         "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    ),
    (
        "qwen3_5",
        {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
         "mrope_section": [1, 1, 0], "mrope_interleaved": True},
        {"rope_type": "default", "rope_theta": 1e7},
    ),
    (
        "phi",
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 1e4},
    ),
    (
        "phi3",
        {"rope_type": "longrope", "rope_theta": 2e4, "short_factor": [1.0, 1.0],
         "long_factor": [2.0, 4.0], "partial_rotary_factor": 0.5,
         "original_max_position_embeddings": 128},
        {"rope_type": "default", "rope_theta": 2e4},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rope", "expected"), ROTARY)
def test_a_drafter_takes_frequencies_that_no_engine_reads_differently(
    name: str, rope: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    target = load(tmp_path, name, rope_parameters=rope)
    spec = spec_of(target.description)
    assert spec.rope_parameters == expected
    assert len(DFlashDrafter(spec).inv_freq) == spec.head_dim // 2
    found = check_head(target.model, target.description, target.tables, documents())
    assert found.holds


def test_of_frequencies_for_kinds_of_layers_those_of_full_attention_are_taken() -> None:
    kinds = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = AutoConfig.for_model("gemma3_text", rope_parameters=kinds)
    assert fixed_rope(config) == {"rope_type": "default", "rope_theta": 1e6}
    assert next(iter(config.rope_parameters)) == "sliding_attention"


def test_a_family_outside_the_table_is_refused_by_name_before_its_weights(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "granite")
    (tmp_path / "model.safetensors").unlink()
    table = TargetTable(model=str(tmp_path))
    for read in (describe_target, lambda table: load_target(table, "cpu")):
        with pytest.raises(ConfigError, match=r"type 'granite'.*not tested.*gemma3_text.*smollm3"):
            read(table)
    with pytest.raises(ConfigError, match=r"target\.allow_untested_target = true"):
        describe_target(table)


def test_an_untested_family_is_used_where_that_is_asked_for(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "granite", logits_scaling=2.0, embedding_multiplier=3.0)
    table = TargetTable(model=str(tmp_path), dtype="float32", allow_untested_target=True)
    target, model = describe_target(table), load_target(table, "cpu")
    assert target.family is UNTESTED
    tables = load_embedding_and_head(table, "cpu", torch.float32)
    found = check_head(model, target, tables, documents())
    assert found.holds  # divided logits have the same choices
    assert not found.is_whole
    assert not check_embedding(model, target, tables, documents()[0]).holds


def test_a_head_with_a_bias_has_no_losses_against_its_distribution(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "phi")
    describe_target(TargetTable(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"last_hidden_states_normed = true.*'phi'.*bias"):
        describe_target(TargetTable(model=str(tmp_path), last_hidden_states_normed=True))


def test_every_layer_but_the_last_can_be_kept(target: Target) -> None:
    (token_ids, *_) = documents()
    with FeatureTap(target.model, tuple(range(NUM_LAYERS - 1))) as tap:
        assert all(check.holds for check in check_features(target.model, tap, token_ids))
