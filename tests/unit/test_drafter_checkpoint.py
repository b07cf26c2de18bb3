"""A checkpoint means the same to whoever reads it: a fresh process, the published code, engines."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.shared import TargetTable
from common.drafters.dflash.checkpoint import read_drafter, read_spec, write_drafter
from common.drafters.dflash.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DrafterSpec,
    DrafterTable,
    resolve_spec,
)
from common.drafters.dflash.drafting import DraftContext
from common.drafters.dflash.model import DFlashDrafter
from common.errors import CheckpointError
from common.target.loading import describe_target
from common.target.weights import load_embedding_and_head
from tests.drafters import make_drafter, make_spec, make_tables
from tests.targets import make_tiny_target

SPECS = {
    "full": {},
    "sliding": {"layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "sliding_window": 5},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip
DRAFT = """
import sys
from pathlib import Path
import torch
from common.drafters.dflash.checkpoint import read_drafter
from common.drafters.dflash.drafting import DraftContext
folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt")
drafter = read_drafter(folder, torch.device("cpu"), torch.float32)
context = DraftContext(drafter, given["embedding"], given["head"])
context.append(given["features"])
torch.save(context.propose(given["tokens"], given["anchors"]), folder / "logits.pt")
"""


def write(folder: Path, spec: DrafterSpec) -> DFlashDrafter:
    drafter = make_drafter(spec)
    write_drafter(folder, drafter.state_dict(), spec)
    return drafter


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def read(folder: Path) -> DFlashDrafter:
    return read_drafter(folder, torch.device("cpu"), torch.float32)


def test_fresh_process_computes_equal_logits(tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target", hidden_size=64, head_dim=32, tie_word_embeddings=True)
    table = TargetTable(model=str(tmp_path / "target"))
    target = describe_target(table)
    spec = resolve_spec(
        DrafterTable(num_layers=2, block_size=4), target, target_layer_ids=(1, 3), mask_token_id=290
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32), "width is not H / n_h"
    drafter = write(tmp_path, spec)
    config = config_of(tmp_path)
    assert (config["tie_word_embeddings"], config["head_dim"]) == (False, 32)
    tables = load_embedding_and_head(table, "cpu", torch.float32)
    assert tables.embedding is tables.head
    given = {
        "embedding": tables.embedding,
        "head": tables.head,
        "features": torch.randn(9, 2 * 64),
        "tokens": torch.tensor([5, 6]),
        "anchors": torch.tensor([4, 9]),
    }
    torch.save(given, tmp_path / "given.pt")
    subprocess.run([sys.executable, "-c", DRAFT, str(tmp_path)], check=True, timeout=50)
    rounded = {name: value.bfloat16().float() for name, value in drafter.state_dict().items()}
    drafter.load_state_dict(rounded)
    context = DraftContext(drafter.eval(), given["embedding"], given["head"])
    context.append(given["features"])
    expected = context.propose(given["tokens"], given["anchors"])
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


@pytest.mark.parametrize("kind", SPECS)
def test_spec_and_weights_come_back_as_they_were_written(tmp_path: Path, kind: str) -> None:
    spec = make_spec(**SPECS[kind])
    drafter = write(tmp_path, spec)
    # The decay belongs to the loss and is not part of the network.
    differences = [line for line in read_spec(tmp_path).differences(spec) if "gamma" not in line]
    assert differences == []
    for name, value in read(tmp_path).state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name].bfloat16().float()), name


def test_weights_are_bfloat16_and_hold_neither_embedding_nor_head(tmp_path: Path) -> None:
    write(tmp_path, make_spec())
    weights = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert len(weights) == 11 * 2 + 3
    assert not [name for name in weights if "embed" in name or "lm_head" in name or "inv_" in name]


def test_config_has_what_readers_of_either_age_look_for(tmp_path: Path) -> None:
    write(tmp_path, make_spec())
    config = config_of(tmp_path)
    inner = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["block_size"] == inner["block_size"] == 4
    assert inner["mask_token_id"] == 96
    assert inner["target_layer_ids"] == [1, 3, 5]
    assert config["num_target_layers"] == 8
    assert (config["use_sliding_window"], config["sliding_window"]) == (False, None)
    assert not {"causal", "is_causal", "auto_map"} & (set(config) | set(inner))


def test_sliding_layers_and_window_are_written(tmp_path: Path) -> None:
    write(tmp_path, make_spec(**SPECS["sliding"]))
    config = config_of(tmp_path)
    assert config["layer_types"] == [SLIDING_ATTENTION, FULL_ATTENTION]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 5)


def test_scaled_rope_is_written_in_both_places(tmp_path: Path) -> None:
    write(tmp_path, make_spec(**SPECS["llama3 rope"]))
    config = config_of(tmp_path)
    assert config["rope_scaling"] == config["rope_parameters"]
    assert config["rope_scaling"]["rope_type"] == "llama3"


def test_older_config_with_block_size_and_theta_at_the_top_is_read(tmp_path: Path) -> None:
    write(tmp_path, make_spec())
    config = config_of(tmp_path)
    del config["rope_parameters"], config["dflash_config"]["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = read_spec(tmp_path)
    assert spec.block_size == 4
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_older_config_keeps_its_rope_scaling(tmp_path: Path) -> None:
    spec = make_spec(**SPECS["llama3 rope"])
    write(tmp_path, spec)
    config = config_of(tmp_path)
    del config["rope_parameters"]
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_spec(tmp_path).rope_parameters == spec.rope_parameters


def test_a_drafter_turns_whole_heads_where_its_target_turns_parts(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0], "mrope_interleaved": True}  # fmt: skip
    make_tiny_target(tmp_path / "target", "qwen3_5", rope_parameters=rope)
    target = describe_target(TargetTable(model=str(tmp_path / "target")))
    assert target.rope["partial_rotary_factor"] == 0.25
    spec = resolve_spec(DrafterTable(), target, target_layer_ids=(1, 3), mask_token_id=290)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    # So does published code, whatever a config says.
    write(tmp_path, dataclasses.replace(make_spec(), rope_parameters=rope))
    assert read_spec(tmp_path).rope_parameters == spec.rope_parameters


@pytest.mark.parametrize("kind", SPECS)
def test_published_code_loads_it_whole_and_computes_the_same(tmp_path: Path, kind: str) -> None:
    dflash = pytest.importorskip("dflash.model", reason="oracle dflash 0.1.0 is not installed")
    spec = make_spec(**SPECS[kind])
    write(tmp_path, spec)
    model, report = dflash.DFlashDraftModel.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), f"missing, unexpected or mismatched: {report}"
    drafter = read(tmp_path)
    embedding, head = make_tables(spec)
    features = torch.randn(11, 3 * spec.hidden_size)
    context = DraftContext(drafter, embedding, head)
    context.append(features)
    got = context.final_hidden_states(torch.tensor([3]), torch.tensor([11]))
    ids = torch.tensor([3] + [spec.mask_token_id] * 3)
    expected = model.eval()(
        position_ids=torch.arange(11 + 4)[None],
        noise_embedding=embedding[ids][None],
        target_hidden=features[None],
    )
    torch.testing.assert_close(got, expected[0, 1:], rtol=1e-4, atol=1e-4)


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path, make_spec())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["hidden_norm.weight"]
    weights["mask_embedding"] = torch.zeros(4)
    weights["norm.weight"] = torch.zeros(7)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    message = str(caught.value)
    assert "hidden_norm.weight is missing" in message
    assert "mask_embedding is not known" in message
    assert "norm.weight got (7,), expected (48,)" in message


@pytest.mark.parametrize(
    "key",
    ["dflash_config", "head_dim", "num_target_layers", "layer_types", "max_position_embeddings"],
)
def test_config_that_lacks_a_key_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    write(tmp_path, make_spec())
    config = config_of(tmp_path)
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"lacks '{key}'"):
        read_spec(tmp_path)


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_layer_ids_and_mask_token_are_never_guessed(tmp_path: Path, key: str) -> None:
    write(tmp_path, make_spec())
    config = config_of(tmp_path)
    del config["dflash_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"lacks '{key}'"):
        read_spec(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    write(tmp_path, make_spec())
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(tmp_path)


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(tmp_path)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    spec = make_spec()
    state = make_drafter(spec).state_dict()
    state["norm.weight"] = torch.full((48,), float("nan"))
    with pytest.raises(CheckpointError, match=r"'norm\.weight' holds NaN"):
        write_drafter(tmp_path, state, spec)
    assert list(tmp_path.iterdir()) == []
