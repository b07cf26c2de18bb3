"""Captured features are the model's own hidden states, and packed documents do not mix."""

import pytest
import torch
from torch import nn

from common.config.shared import TargetTable
from common.errors import CaptureMismatchError
from common.target.checks import (
    check_features,
    check_float8,
    check_isolation,
    packing_is_isolated,
)
from common.target.features import FeatureTap, decoder_of, run_packed, run_row
from common.target.loading import load_target
from tests.targets import NUM_LAYERS, make_tiny_target

LAYER_IDS = (0, 2, 4)


class OffByOneTap(FeatureTap):
    """Keeps the output of the layer behind the one it names."""

    def __init__(self, model, layer_ids):
        super().__init__(model, tuple(layer + 1 for layer in layer_ids))
        self.layer_ids = layer_ids

    def _keep(self, layer, module, inputs, output):
        super()._keep(layer - 1, module, inputs, output)


class BorderlessTarget(nn.Module):
    """A target whose attention does not see the borders of documents."""

    def __init__(self, model):
        super().__init__()
        self.decoder = model.get_decoder()

    def get_decoder(self):
        return self

    def forward(self, **inputs):
        mask = torch.ones_like(inputs["input_ids"])
        return self.decoder(attention_mask=mask, **inputs)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    path = make_tiny_target(tmp_path_factory.mktemp(request.param), request.param)
    return load_target(TargetTable(model=str(path), dtype="float32"), "cpu")


def documents(*lengths):
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 280, (length,), generator=random) for length in lengths]


def positions(parts):
    return torch.cat([torch.arange(len(part)) for part in parts])


def hidden_states(model, token_ids):
    with torch.no_grad():
        return model(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states


def test_features_are_the_outputs_of_the_chosen_layers(model):
    (token_ids,) = documents(40)
    own = hidden_states(model, token_ids)
    with FeatureTap(model, LAYER_IDS) as tap:
        kept = run_packed(model, tap, token_ids, torch.arange(40))
    expected = torch.cat([own[layer + 1][0] for layer in LAYER_IDS], dim=-1)
    assert torch.equal(kept, expected)


def test_check_holds_for_each_layer_and_fails_for_one_that_is_off_by_one(model):
    (token_ids,) = documents(40)
    with FeatureTap(model, LAYER_IDS) as tap:
        checks = check_features(model, tap, token_ids)
    assert [check.layer_id for check in checks] == list(LAYER_IDS)
    assert all(check.holds for check in checks)
    with OffByOneTap(model, LAYER_IDS) as tap:
        assert not any(check.holds for check in check_features(model, tap, token_ids))


def test_packed_documents_have_the_features_they_have_singly(model):
    parts = documents(11, 1, 7, 30)
    token_ids, position_ids = torch.cat(parts), positions(parts)
    with FeatureTap(model, LAYER_IDS) as tap:
        packed = run_packed(model, tap, token_ids, position_ids)
        separate = run_row(model, tap, token_ids, position_ids, is_packed=False).aux_hidden_states
        alone = [run_packed(model, tap, part, torch.arange(len(part))) for part in parts]
    assert torch.equal(separate, torch.cat(alone))
    torch.testing.assert_close(packed, separate, atol=1e-4, rtol=1e-4)


def test_float8_check_measures_what_a_row_in_float8_loses(model):
    with FeatureTap(model, LAYER_IDS) as tap:
        lost = check_float8(model, tap, documents(40)[0])
        # Rounding to four significant bits: 2^-4 at most, about 2.6 % on average.
        assert 0.015 < lost.error < 0.04
        assert lost.error < lost.layer_error < 2.0**-4 * 1.01
        assert lost.layer_id in LAYER_IDS
        assert 0.998 < lost.cosine < 0.9999


def test_isolation_check_sees_documents_that_mix(model):
    parts = documents(20, 20)
    with FeatureTap(model, LAYER_IDS) as tap:
        assert packing_is_isolated(model, tap, parts)
        leaking = check_isolation(BorderlessTarget(model), tap, parts)
    assert leaking.gap > 10 * leaking.tolerance
    assert not leaking.is_isolated


def test_isolation_check_takes_rounding_for_what_it_is_and_a_leak_under_it_for_a_leak(model):
    parts = documents(20, 20, 20)

    def round_by_shape(_module, _given, output):
        generator = torch.Generator().manual_seed(output.shape[1])
        return output + 0.005 * output.std() * torch.randn(output.shape, generator=generator)

    hook = model.get_input_embeddings().register_forward_hook(round_by_shape)
    try:
        with FeatureTap(model, LAYER_IDS) as tap:
            rounded = check_isolation(model, tap, parts)
            leaking = check_isolation(BorderlessTarget(model), tap, parts)
    finally:
        hook.remove()
    assert rounded.is_isolated
    assert rounded.gap > 10 * 1e-4  # more than float32's
    assert not leaking.is_isolated


def test_linear_attention_is_found_to_mix_documents_and_does_not_document_by_document(tmp_path):
    path = make_tiny_target(tmp_path, "qwen3_5")
    model = load_target(TargetTable(model=str(path), dtype="float32"), "cpu")
    parts = documents(20, 20)
    with FeatureTap(model, LAYER_IDS) as tap:
        assert not packing_is_isolated(model, tap, parts)
        row = run_row(model, tap, torch.cat(parts), positions(parts), is_packed=False)
        separate = row.aux_hidden_states
        alone = run_packed(model, tap, parts[1], torch.arange(20))
    assert torch.equal(separate[20:], alone)


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_head_makes_the_targets_logits_of_the_last_hidden_states(model, is_packed):
    parts = documents(20, 1, 9)
    with FeatureTap(model, (1,), keep_last_normed=True) as tap:
        row = run_row(model, tap, torch.cat(parts), positions(parts), is_packed=is_packed)
    with torch.no_grad():
        own = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])
        made = model.get_output_embeddings()(row.last_hidden_states_normed)
    torch.testing.assert_close(made, own, atol=1e-4, rtol=1e-4)
    assert row.aux_hidden_states.shape == row.last_hidden_states_normed.shape


def test_last_hidden_states_have_passed_the_final_norm(model):
    (token_ids,) = documents(20)
    with FeatureTap(model, (1,), keep_last_normed=True) as tap:
        run_packed(model, tap, token_ids, torch.arange(20))
        kept = tap.last_hidden_states_normed()
    assert torch.equal(kept, hidden_states(model, token_ids)[NUM_LAYERS][0])


def test_a_tap_that_does_not_keep_the_last_hidden_states_has_none(model):
    (token_ids,) = documents(20)
    with FeatureTap(model, LAYER_IDS) as tap:
        row = run_row(model, tap, token_ids, torch.arange(20), is_packed=True)
    assert row.last_hidden_states_normed is None


def test_layers_above_the_highest_kept_one_are_not_run(model):
    (token_ids,) = documents(8)
    ran = []
    hook = decoder_of(model).layers[5].register_forward_hook(lambda *_: ran.append(1))
    with FeatureTap(model, LAYER_IDS) as tap:
        run_packed(model, tap, token_ids, torch.arange(8))
        assert not ran
        hidden_states(model, token_ids)
        assert ran
    hook.remove()


def test_closed_tap_leaves_the_model_as_it_was(model):
    def count_hooks():
        return [len(layer._forward_hooks) for layer in decoder_of(model).layers]

    before = count_hooks()
    with FeatureTap(model, LAYER_IDS):
        assert count_hooks() != before
    assert count_hooks() == before


def test_layer_that_the_model_lacks_cannot_be_tapped(model):
    with pytest.raises(CaptureMismatchError, match="expected ids from 0 to 5"):
        FeatureTap(model, (1, 6))
