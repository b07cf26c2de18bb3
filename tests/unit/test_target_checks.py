"""A target that is really broken does not start, and the refusal names what is wrong and the way out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from common.config.shared import TargetTable
from common.errors import ConfigError, TargetCheckError
from common.target.features import FeatureTap, decoder_layers, decoder_of
from common.target.loading import describe_target, load_target, load_tokenizer, num_token_ids
from common.target.weights import load_embedding_and_head
from services.target_server.checks import CheckList, check_target, check_vocabulary
from services.target_server.packing import PackedRow, Sample, make_row
from tests.targets import make_tiny_target

LAYER_IDS = (0, 2, 4)
MASK = 290
Break = Callable[[nn.Module], Any]


def make_packed_row(*lengths: int, row_tokens: int = 128) -> PackedRow:
    chooser = np.random.default_rng(0)
    samples = [
        Sample(
            sample_id=index,
            tag=0,
            token_ids=chooser.integers(3, 280, length).astype(np.int32),
            loss_mask=np.ones(length, dtype=np.uint8),
        )
        for index, length in enumerate(lengths)
    ]
    return make_row(samples, row_tokens, 0, 0)


@contextmanager
def broken(model: nn.Module, break_it: Break) -> Iterator[None]:
    """Break a model by a hook, or in its weights, for a while."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    hook = break_it(model)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        model.load_state_dict(saved)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose final norm weighs: what skips it has other choices."""
    path = make_tiny_target(tmp_path_factory.mktemp("target"), "qwen3")
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors["model.norm.weight"] += torch.randn(32, generator=generator) * 0.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def table(folder: Path) -> TargetTable:
    return TargetTable(model=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def model(table: TargetTable) -> nn.Module:
    return load_target(table, "cpu")


def run_checks(
    table: TargetTable,
    model: nn.Module,
    *,
    tap_class: type[FeatureTap] = FeatureTap,
    row: PackedRow | None = None,
    keep_last: bool = False,
    mask_token_id: int = MASK,
    **changes: Any,
) -> dict[str, str]:
    """Return the results of all checks on a row; `changes` are of the target's description."""
    checks = CheckList()
    with tap_class(model, LAYER_IDS, keep_last_normed=keep_last) as tap:
        check_target(
            checks, model, tap, row or make_packed_row(30, 1, 41),
            target=replace(describe_target(table), **changes),
            tables=load_embedding_and_head(table, "cpu", torch.float32),
            mask_token_id=mask_token_id,
            is_float8=True,
        )  # fmt: skip
    return checks.results


class OffByOneTap(FeatureTap):
    """Hooks the layer behind the one it names."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...], **settings: Any) -> None:
        super().__init__(model, tuple(layer + 1 for layer in layer_ids), **settings)
        self.layer_ids = layer_ids

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        super()._keep(layer - 1, module, inputs, output)


def shift_head(model: nn.Module) -> None:
    weight = model.get_output_embeddings().weight
    weight.copy_(weight.roll(1, 0))


def shift_embedding(model: nn.Module) -> None:
    weight = model.get_input_embeddings().weight
    weight.copy_(weight.roll(1, 0))


def skip_norm(model: nn.Module) -> Any:
    return decoder_of(model).norm.register_forward_hook(lambda _norm, inputs, _out: inputs[0])


def scale_inputs(model: nn.Module) -> Any:
    return model.get_input_embeddings().register_forward_hook(lambda *given: given[-1] * 3.0)


def scale_logits(model: nn.Module) -> Any:
    return model.get_output_embeddings().register_forward_hook(lambda *given: given[-1] * 0.9)


def add_to_logits(model: nn.Module) -> Any:
    """A bias that the family does not have."""
    bias = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 5
    return model.get_output_embeddings().register_forward_hook(lambda *given: given[-1] + bias)


def test_a_whole_target_passes_and_every_result_is_told(
    table: TargetTable, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    results = run_checks(table, model, keep_last=True)
    assert list(results) == [
        "tables", "mask_row", "embedding", "layer_0", "layer_2", "layer_4", "head", "packing",
        "float8",
    ]  # fmt: skip
    assert results["head"].startswith("argmax equal at 72 of 72 positions, 0 ties")
    assert results["tables"].startswith("embedding and head [300, 32], two tensors")
    assert "rms" in results["layer_4"]
    assert results["packing"].startswith("isolated")
    for name, text in results.items():
        assert f"check {name}: {text}" in caplog.text


def test_the_head_is_checked_at_a_thousand_positions(table: TargetTable, model: nn.Module) -> None:
    row = make_packed_row(400, 300, 500, 50, row_tokens=1280)
    assert " of 1000 positions" in run_checks(table, model, row=row)["head"]


@pytest.mark.parametrize(
    ("break_it", "check", "words", "way_out"),
    [
        (shift_head, "tables", "head: 300 of 300 rows", "save_pretrained"),
        (shift_embedding, "tables", "embedding: 300 of 300 rows", "save_pretrained"),
        (skip_norm, "head", "do not make the target's logits", "choose another target"),
        (add_to_logits, "head", "do not make the target's logits", "choose another target"),
        (scale_inputs, "embedding", "times 1 are the target's inputs", "choose another target"),
    ],
)
def test_a_broken_target_is_refused(
    table: TargetTable, model: nn.Module, break_it: Break, check: str, words: str, way_out: str
) -> None:
    with (
        torch.no_grad(),
        broken(model, break_it),
        pytest.raises(TargetCheckError, match=f"check {check} of the target") as caught,
    ):
        run_checks(table, model)
    assert words in str(caught.value)
    assert way_out in str(caught.value)
    assert caught.value.results[check].startswith("failed: ")
    assert isinstance(caught.value, ConfigError)  # exit code 2
    run_checks(table, model)


def test_features_of_the_wrong_layer_are_refused(table: TargetTable, model: nn.Module) -> None:
    with pytest.raises(
        TargetCheckError, match=r"kept features are not hidden_states\[1\].*target_layer_ids"
    ) as caught:
        run_checks(table, model, tap_class=OffByOneTap)
    assert "layer_0" in caught.value.results


def test_a_head_of_shifted_rows_is_refused_by_its_choices_too(
    table: TargetTable, model: nn.Module
) -> None:
    """Not only against the files: the tables here are equal, and the model's pass uses other rows."""

    def shift_products(model: nn.Module) -> Any:
        head = model.get_output_embeddings()
        return head.register_forward_hook(lambda *given: given[-1].roll(1, -1))

    with (
        broken(model, shift_products),
        pytest.raises(TargetCheckError, match="check head") as caught,
    ):
        run_checks(table, model)
    assert "argmax equal at 0 of 72" in str(caught.value)


def prefer(token: int, margin: float, position: int = 5) -> Break:
    """Have one position choose another token, whose logit is above the largest by a margin."""

    def change(_head: nn.Module, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        changed[:, position, token] = logits[:, position].amax() + margin
        return changed

    return lambda model: model.get_output_embeddings().register_forward_hook(change)


def test_one_position_with_another_choice_is_refused_and_a_tie_is_counted(
    table: TargetTable, model: nn.Module
) -> None:
    row = make_packed_row(60)
    with broken(model, prefer(7, 1e-6)):
        assert "59 of 60 positions, 1 ties" in run_checks(table, model, row=row)["head"]
    with (
        broken(model, prefer(7, 0.5)),
        pytest.raises(TargetCheckError, match=r"59 of 60 .*, 0 ties"),
    ):
        run_checks(table, model, row=row)


def test_scaled_logits_matter_to_losses_against_the_target_alone(
    table: TargetTable, model: nn.Module
) -> None:
    with broken(model, scale_logits):
        assert run_checks(table, model)["head"].startswith("warning: the target scales")
        with pytest.raises(TargetCheckError, match="last_hidden_states_normed to false"):
            run_checks(table, model, keep_last=True)


def test_documents_that_mix_are_run_separately_with_a_warning(
    table: TargetTable, model: nn.Module
) -> None:
    def mix(model: nn.Module) -> Any:
        """Add what all positions before have left: a state that runs on."""
        mlp = decoder_layers(model)[0].mlp
        return mlp.register_forward_hook(lambda _mlp, _inputs, out: out + out.cumsum(1) / 8)

    with broken(model, mix):
        found = run_checks(table, model)["packing"]
    assert found.startswith("warning: run separately")


def test_files_of_two_models_are_refused(table: TargetTable, model: nn.Module) -> None:
    with pytest.raises(TargetCheckError, match=r"\[300, 32\], expected \[320, 32\] of its config"):
        run_checks(table, model, vocab_size=320)


def test_a_mask_that_the_first_row_has_is_warned_of(table: TargetTable, model: nn.Module) -> None:
    row = make_packed_row(30, 41)
    seen = int(row.token_ids[4])
    found = run_checks(table, model, row=row, mask_token_id=seen)["mask_row"]
    assert found.startswith(f"warning: token {seen} is ")
    assert "times in the first row" in found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_mask_row_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    path = make_tiny_target(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][MASK] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    other = TargetTable(model=str(path), dtype="float32")
    with pytest.raises(TargetCheckError, match=f"row {MASK} holds NaN or infinity.*mask_token_id"):
        run_checks(other, load_target(other, "cpu"))


def check_tokens(folder: Path, **settings: Any) -> tuple[int, dict[str, str]]:
    checks, table = CheckList(), TargetTable(model=str(folder), **settings)
    mask = check_vocabulary(checks, table, describe_target(table), load_tokenizer(table))
    return mask, checks.results


def test_every_token_has_an_embedding_row(folder: Path, tmp_path: Path) -> None:
    mask, results = check_tokens(folder)
    assert mask == 280
    assert results["tokenizer"] == "280 ids, 300 embedding rows"
    assert results["mask_token"] == "row 280, no token's"
    small = make_tiny_target(tmp_path, vocab_size=250)
    with pytest.raises(TargetCheckError, match=r"reach 279.*the embedding's 250 rows.*beside"):
        check_tokens(small)


def test_a_mask_that_text_can_have_is_warned_of_and_a_reserved_one_is_not(folder: Path) -> None:
    mask, results = check_tokens(folder, mask_token_id=100)
    assert mask == 100
    assert results["mask_token"].startswith("warning: row 100 is the token ")
    _, results = check_tokens(folder, mask_token_id=1)
    assert results["mask_token"] == "row 1, '<|im_start|>'"
    with pytest.raises(ConfigError, match="expected 0 to 299"):
        check_tokens(folder, mask_token_id=300)


def test_gaps_in_a_tokenizers_ids_do_not_lend_a_used_row_as_the_mask(folder: Path) -> None:
    """A length is no id: with gaps, the row at the length is a token's."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 7}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert (len(tokenizer), num_token_ids(tokenizer)) == (3, 8)
    table = TargetTable(model=str(folder))
    assert check_vocabulary(CheckList(), table, describe_target(table), tokenizer) == 8
