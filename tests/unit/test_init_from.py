"""Training that starts from a drafter which exists: ours or a released one, and no other."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from common.config.loading import load
from common.config.shared import TargetTable
from common.contracts.sequences import SequenceSet
from common.drafters.dflash.checkpoint import drafter_config, write_drafter
from common.drafters.dflash.config import DrafterSpec
from common.errors import ConfigError
from common.target.loading import describe_target
from common.target.weights import load_embedding_and_head
from services.drafter_worker.build import Trainee, build_trainee, make_spec
from services.drafter_worker.checkpoint import CheckpointStore, TrainerState
from services.drafter_worker.config import WorkerConfig
from tests.drafters import make_drafter
from tests.targets import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "target")


def config_for(target: Path, *settings: str) -> WorkerConfig:
    options = [
        f"target.model={target}", "target.num_aux_layers=2", "drafter.num_layers=1",
        "drafter.block_size=4", "drafter.num_anchors=16", *settings,
    ]  # fmt: skip
    return load(WorkerConfig, [], options, {})


def spec_for(target: Path, **changes: Any) -> DrafterSpec:
    config = config_for(target)
    return dataclasses.replace(make_spec(config, describe_target(config.target)), **changes)


def write_origin(folder: Path, spec: DrafterSpec) -> dict[str, torch.Tensor]:
    folder.mkdir()
    weights = make_drafter(spec, seed=7).state_dict()
    write_drafter(folder, weights, spec, "float32")
    return weights


def start_from(folder: Path, target: Path, *settings: str) -> Trainee:
    config = config_for(target, f"drafter.init_from={folder}", *settings)
    return build_trainee(config, CheckpointStore(folder.parent / "checkpoints", 2))


def refusal(folder: Path, target: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start_from(folder, target, *settings)
    assert not list((folder.parent / "checkpoints").glob("*")), "nothing is written"
    return str(caught.value)


def assert_weights(trainee: Trainee, expected: dict[str, torch.Tensor]) -> None:
    names = dict(trainee.drafter.named_parameters())
    for name, master in zip(names, trainee.optimizer.masters, strict=True):
        assert torch.equal(master, expected[name]), name


def test_training_starts_with_the_weights_of_the_folder(tmp_path: Path, target: Path) -> None:
    weights = write_origin(tmp_path / "origin", spec_for(target))
    trainee = start_from(tmp_path / "origin", target)
    assert_weights(trainee, weights)
    assert trainee.progress.step == 0


def test_a_folder_that_the_published_package_saved_is_taken(tmp_path: Path, target: Path) -> None:
    dflash = pytest.importorskip("dflash.model", reason="oracle dflash 0.1.0 is not installed")
    config = Qwen3Config(**drafter_config(spec_for(target, max_position_embeddings=77)))
    torch.manual_seed(3)
    model = dflash.DFlashDraftModel(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "released")
    saved = json.loads((tmp_path / "released" / "config.json").read_text())
    assert "rope_theta" not in saved, "as released folders of transformers 5 are"
    trainee = start_from(tmp_path / "released", target)
    assert_weights(trainee, {name: x.float() for name, x in model.state_dict().items()})
    assert trainee.spec.max_position_embeddings == 77, "no setting has it: it is the drafter's own"


def test_each_difference_is_named_in_one_error_with_its_setting(
    tmp_path: Path, target: Path
) -> None:
    other = spec_for(
        target, block_size=8, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
        target_layer_ids=(0, 1, 4), mask_token_id=299, num_layers=2,
        layer_types=("full_attention",) * 2, num_target_layers=9, vocab_size=301, hidden_size=16,
    )  # fmt: skip
    write_origin(tmp_path / "origin", other)
    message = refusal(tmp_path / "origin", target)
    for words in (
        "block_size got 8, expected 4 by drafter.block_size",
        "num_heads got 2, expected 4 by drafter.num_heads",
        "num_kv_heads got 1, expected 2 by drafter.num_kv_heads",
        "head_dim got 16, expected 8 by drafter.head_dim",
        "intermediate_size got 48, expected 64 by drafter.intermediate_size",
        "num_layers got 2, expected 1 by drafter.num_layers",
        "target_layer_ids got (0, 1, 4), expected (1, 3) by target.target_layer_ids",
        "mask_token_id got 299, expected 280 by target.mask_token_id",
        "hidden_size got 16, expected 32 by target.model",
        "vocab_size got 301, expected 300 by target.model",
        "num_target_layers got 9, expected 6 by target.model",
    ):
        assert words in message, message
    assert "is not known" not in message, "the file fits its own config"


def test_a_window_that_differs_is_named(tmp_path: Path, target: Path) -> None:
    write_origin(tmp_path / "origin", spec_for(target))
    message = refusal(tmp_path / "origin", target, "drafter.sliding_window=16")
    assert "layer_types got ('full_attention',), expected ('sliding_attention',)" in message


def test_tensors_that_do_not_belong_are_named_with_the_rest(tmp_path: Path, target: Path) -> None:
    origin = tmp_path / "origin"
    weights = write_origin(origin, spec_for(target))
    del weights["hidden_norm.weight"]
    weights["d2t"] = torch.arange(4)
    weights["norm.weight"][0] = float("nan")
    weights["lm_head.weight"] = torch.zeros(300, 32)
    save_file(weights, origin / "model.safetensors")
    message = refusal(origin, target, "drafter.block_size=8")
    for words in (
        "block_size got 4, expected 8", "hidden_norm.weight is missing", "d2t is not known",
        "norm.weight holds NaN", "lm_head.weight (300, 32)", "is not the target's",
    ):  # fmt: skip
        assert words in message, message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_quantized_tensors_are_named(tmp_path: Path, target: Path, dtype: torch.dtype) -> None:
    origin = tmp_path / "origin"
    weights = write_origin(origin, spec_for(target))
    save_file(weights | {"fc.weight": weights["fc.weight"].to(dtype)}, origin / "model.safetensors")
    assert f"fc.weight has elements of {dtype}" in refusal(origin, target)


def test_embedding_and_head_of_the_target_itself_are_passed_over(
    tmp_path: Path, target: Path
) -> None:
    origin = tmp_path / "origin"
    weights = write_origin(origin, spec_for(target))
    tables = load_embedding_and_head(TargetTable(model=str(target)), "cpu", torch.bfloat16)
    both = {"embed_tokens.weight": tables.embedding, "lm_head.weight": tables.head}
    save_file(load_file(origin / "model.safetensors") | both, origin / "model.safetensors")
    assert_weights(start_from(origin, target), weights)


@pytest.mark.parametrize("kind", ["nothing", "no config", "cut off", "speculators"])
def test_a_folder_that_is_no_drafter_is_refused_by_name(
    tmp_path: Path, target: Path, kind: str
) -> None:
    origin = tmp_path / "origin"
    if kind != "nothing":
        write_origin(origin, spec_for(target))
    if kind == "no config":
        (origin / "config.json").unlink()
    elif kind == "cut off":
        content = (origin / "model.safetensors").read_bytes()
        (origin / "model.safetensors").write_bytes(content[:-100])
    elif kind == "speculators":
        (origin / "config.json").write_text('{"speculators_model_type": "dflash"}')
    message = refusal(origin, target)
    assert "drafter.init_from" in message
    assert str(origin) in message


def test_a_resume_does_not_read_the_folder_again(tmp_path: Path, target: Path) -> None:
    origin = tmp_path / "origin"
    write_origin(origin, spec_for(target, max_position_embeddings=77))
    trainee = start_from(origin, target)
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    masters = dict(
        zip(dict(trainee.drafter.named_parameters()), trainee.optimizer.masters, strict=True)
    )
    store.save(
        lambda folder: write_drafter(folder, masters, trainee.spec), trainee.optimizer.state(),
        TrainerState(step=5, trained_rows=5, trained_tokens=9, consumed=SequenceSet(low=5)),
        {"template_fingerprint": "t"},
    )  # fmt: skip
    for path in origin.iterdir():
        path.unlink()
    resumed = start_from(origin, target)
    assert resumed.progress.step == 5
    assert resumed.spec == trainee.spec


def test_two_starts_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="are two starts"):
        config_for(target, "drafter.init=target_layers", "drafter.init_from=/a")
