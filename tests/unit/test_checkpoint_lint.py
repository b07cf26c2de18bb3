"""Each key that some engine would take for something else is named, with that engine."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.drafters.dflash.checkpoint import read_spec, write_drafter
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION
from common.drafters.dflash.findings import (
    NOTHING,
    RINGDRAFT,
    SGLANG,
    SPECFORGE,
    VLLM,
    ZLAB,
    Finding,
)
from common.drafters.dflash.lint import lint
from common.drafters.dflash.speculators import TargetReference, write_speculators
from common.errors import CheckpointError
from tests.drafters import make_drafter, make_spec

SLIDING = {"layer_types": (SLIDING_ATTENTION,) * 2, "sliding_window": 5}
MIXED = {"layer_types": (SLIDING_ATTENTION, FULL_ATTENTION), "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
GONE = object()
Changes = dict[str, Any]


def write_zlab(folder: Path, **spec: Any) -> Path:
    made = make_spec(**spec)
    write_drafter(folder, make_drafter(made).state_dict(), made)
    return folder


def write_other(folder: Path) -> Path:
    spec = make_spec()
    target = TargetReference("a/target", ("LlamaForCausalLM",))
    write_speculators(folder, make_drafter(spec).state_dict(), spec, target, "bfloat16")
    return folder


def change(folder: Path, changes: Changes) -> None:
    """Set keys of config.json by their dotted names, or take them away."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        *tables, key = name.split(".")
        table = config
        for step in tables:
            table = table[step]
        if value is GONE:
            del table[key]
        else:
            table[key] = value
    path.write_text(json.dumps(config), encoding="utf-8")


def named(found: list[Finding]) -> list[str]:
    return [finding.key for finding in found]


@pytest.mark.parametrize("spec", [{}, SLIDING, MIXED, {"rope_parameters": YARN}])
def test_a_checkpoint_of_this_project_has_nothing_to_find(tmp_path: Path, spec: Changes) -> None:
    assert lint(write_zlab(tmp_path, **spec)) == []


def test_a_speculators_export_has_nothing_to_find(tmp_path: Path) -> None:
    assert lint(write_other(tmp_path)) == []


ZLAB_FAULTS: dict[str, tuple[Changes, str, tuple[str, ...]]] = {
    "no architecture": ({"architectures": GONE}, "architectures", (SGLANG, VLLM)),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, "architectures", (VLLM, RINGDRAFT)),
    "another family": ({"model_type": "llama"}, "model_type", (VLLM,)),
    "code not shipped": ({"auto_map": {"AutoModel": "dflash.X"}}, "auto_map", ("transformers",)),
    "block at the top": ({"block_size": GONE}, "block_size", (SPECFORGE,)),
    "block inside": ({"dflash_config.block_size": GONE}, "dflash_config.block_size", ("loaders of newer checkpoints",)),
    "two blocks": ({"block_size": 8}, "block_size", (SPECFORGE, "speculators")),
    "no target layers": ({"num_target_layers": GONE}, "num_target_layers", (ZLAB, SPECFORGE)),
    "features counted": ({"dflash_config.num_target_layers": 3}, "dflash_config.num_target_layers", (SGLANG,)),
    "no layer ids": ({"dflash_config.target_layer_ids": GONE}, "dflash_config.target_layer_ids", (VLLM, ZLAB)),
    "the last layer": ({"dflash_config.target_layer_ids": [1, 3, 7]}, "dflash_config.target_layer_ids", (ZLAB, VLLM)),
    "ids out of order": ({"dflash_config.target_layer_ids": [5, 3, 1]}, "dflash_config.target_layer_ids", (SGLANG, VLLM)),
    "vLLM's ids": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "eagle_aux_hidden_state_layer_ids", (VLLM,)),
    "block of one": ({"dflash_config.block_size": 1}, "dflash_config.block_size", (RINGDRAFT,)),
    "ids of another kind": ({"dflash_config.target_layer_ids": ["1", "3", "5"]}, "dflash_config.target_layer_ids", (RINGDRAFT,)),
    "width of another kind": ({"head_dim": "16"}, "head_dim", (RINGDRAFT,)),
    "no mask token": ({"dflash_config.mask_token_id": GONE}, "dflash_config.mask_token_id", (SGLANG, SPECFORGE)),
    "mask token null": ({"dflash_config.mask_token_id": None}, "dflash_config.mask_token_id", (RINGDRAFT,)),
    "mask token no row": ({"dflash_config.mask_token_id": 97}, "dflash_config.mask_token_id", (VLLM, RINGDRAFT)),
    "is_causal": ({"is_causal": True}, "is_causal", (ZLAB, VLLM, RINGDRAFT)),
    "causal": ({"dflash_config.causal": True}, "dflash_config.causal", (VLLM, RINGDRAFT)),
    "forced window": ({"dflash_config.use_swa": True}, "dflash_config.use_swa", (VLLM, RINGDRAFT)),
    "soft cap": ({"dflash_config.final_logit_softcapping": 30.0}, "dflash_config.final_logit_softcapping", (RINGDRAFT,)),
    "multiplier": ({"dflash_config.output_multiplier": 0.5}, "dflash_config.output_multiplier", (SGLANG,)),
    "scaled embedding": ({"dflash_config.input_embedding_scale": 8.0}, "dflash_config.input_embedding_scale", (RINGDRAFT,)),
    "Domino": ({"dflash_config.projector_type": "domino"}, "dflash_config.projector_type", (ZLAB, RINGDRAFT)),
    "shifted": ({"dflash_config.shift_label": True}, "dflash_config.shift_label", (RINGDRAFT,)),
    "sampled anchor": ({"dflash_config.sample_from_anchor": True}, "dflash_config.sample_from_anchor", (ZLAB,)),
    "no theta": ({"rope_theta": GONE}, "rope_theta", (SGLANG, VLLM)),
    "theta differs": ({"rope_theta": 1e6}, "rope_theta", (SGLANG, VLLM)),
    "partial rotary": ({"rope_parameters.partial_rotary_factor": 0.25}, "rope_parameters.partial_rotary_factor", (VLLM,)),
    "scaling lost": ({"rope_parameters": YARN}, "rope_scaling", (SGLANG, VLLM)),
    "scaling left": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling", (VLLM,)),
    "no kinds": ({"layer_types": GONE}, "layer_types", (ZLAB,)),
    "too few kinds": ({"layer_types": [FULL_ATTENTION]}, "layer_types", (SGLANG, RINGDRAFT)),
    "unknown kind": ({"layer_types": [FULL_ATTENTION, "chunked_attention"]}, "layer_types", (VLLM, RINGDRAFT)),
    "activation": ({"hidden_act": "gelu"}, "hidden_act", (SGLANG, RINGDRAFT)),
    "biases": ({"attention_bias": True}, "attention_bias", (RINGDRAFT,)),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings", (VLLM,)),
    "element type": ({"dtype": "float32"}, "dtype", ("transformers",)),
    "epsilon": ({"rms_norm_eps": GONE}, "rms_norm_eps", (VLLM,)),
    "experts": ({"num_experts": 8}, "num_experts", (VLLM, RINGDRAFT)),
    **{key: ({key: GONE}, key, (SGLANG, VLLM)) for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")},
}  # fmt: skip


@pytest.mark.parametrize("fault", ZLAB_FAULTS)
def test_a_broken_key_is_named_with_who_misreads_it(tmp_path: Path, fault: str) -> None:
    changes, key, readers = ZLAB_FAULTS[fault]
    change(write_zlab(tmp_path), changes)
    (finding,) = [found for found in lint(tmp_path) if found.key == key]
    assert set(readers) <= set(finding.readers)
    assert str(finding).startswith(f"{key}: got ")
    others = {"num_hidden_layers": {"layer_types"}}.get(fault, set())
    assert {name for name in named(lint(tmp_path)) if name != key} == others


SLIDING_FAULTS: dict[str, tuple[Changes, Changes, str]] = {
    "window unused": (MIXED, {"use_sliding_window": False}, "use_sliding_window"),
    "no window": (MIXED, {"sliding_window": None}, "sliding_window"),
    "bidirectional": (SLIDING, {"is_causal": False}, "is_causal"),
    "width of vLLM": (
        SLIDING,
        {"dflash_config.swa_window_size": 7},
        "dflash_config.swa_window_size",
    ),
    "causal, mixed": (MIXED, {"dflash_config.causal": True}, "dflash_config.causal"),
}


@pytest.mark.parametrize("fault", SLIDING_FAULTS)
def test_a_broken_key_of_sliding_layers_is_named(tmp_path: Path, fault: str) -> None:
    spec, changes, key = SLIDING_FAULTS[fault]
    change(write_zlab(tmp_path, **spec), changes)
    (finding,) = lint(tmp_path)
    assert (finding.key, RINGDRAFT in finding.readers) == (key, True)


def test_flags_that_say_what_layer_types_say_are_no_finding(tmp_path: Path) -> None:
    change(write_zlab(tmp_path, **SLIDING), {"is_causal": True, "dflash_config.causal": True})
    assert lint(tmp_path) == []


NETWORK = "transformer_layer_config"
OTHER_FAULTS: dict[str, tuple[Changes, str]] = {
    "algorithm": ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
    "architecture": ({"architectures": ["DFlashDraftModel"]}, "architectures"),
    "algorithm inside": ({"speculators_config.algorithm": "eagle3"}, "speculators_config.algorithm"),
    "no block": ({"block_size": GONE}, "block_size"),
    "tokens": ({"block_size": 8}, "speculators_config.proposal_methods"),
    "unknown method": ({"speculators_config.default_proposal_method": "tree"}, "speculators_config.proposal_methods"),
    "anchor": ({"sample_from_anchor": True}, "sample_from_anchor"),
    "anchor unsaid": ({"sample_from_anchor": GONE}, "sample_from_anchor"),
    "causal full layers": ({"sliding_window_non_causal": False}, "sliding_window_non_causal"),
    "no layer ids": ({"aux_hidden_state_layer_ids": GONE}, "aux_hidden_state_layer_ids"),
    "ids from 0": ({"aux_hidden_state_layer_ids": [0, 3, 5]}, "aux_hidden_state_layer_ids"),
    "mask token": ({"mask_token_id": GONE}, "mask_token_id"),
    "mask token no row": ({"mask_token_id": 97}, "mask_token_id"),
    "small vocabulary": ({"draft_vocab_size": 50}, "draft_vocab_size"),
    "target's width": ({"target_hidden_size": 96}, "target_hidden_size"),
    "no target": ({"speculators_config.verifier.name_or_path": None}, "speculators_config.verifier.name_or_path"),
    "target's kind": ({"speculators_config.verifier.architectures": []}, "speculators_config.verifier.architectures"),
    "no head_dim": ({f"{NETWORK}.head_dim": GONE}, f"{NETWORK}.head_dim"),
    "no theta": ({f"{NETWORK}.rope_theta": GONE}, f"{NETWORK}.rope_theta"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_a_broken_key_of_a_speculators_export_is_named(tmp_path: Path, fault: str) -> None:
    changes, key = OTHER_FAULTS[fault]
    change(write_other(tmp_path), changes)
    assert named(lint(tmp_path)) == [key]


def test_sliding_layers_in_a_speculators_export_are_named(tmp_path: Path) -> None:
    kinds = [SLIDING_ATTENTION, FULL_ATTENTION]
    change(write_other(tmp_path), {f"{NETWORK}.layer_types": kinds, f"{NETWORK}.sliding_window": 5,
                                   f"{NETWORK}.use_sliding_window": True})  # fmt: skip
    assert named(lint(tmp_path)) == [f"{NETWORK}.layer_types"]


def rename(weights: dict[str, torch.Tensor]) -> None:
    weights["context_proj.weight"] = weights.pop("fc.weight")


def add_embedding(weights: dict[str, torch.Tensor]) -> None:
    weights["embed_tokens.weight"] = torch.zeros(97, 48, dtype=torch.bfloat16)


def cut_feature(weights: dict[str, torch.Tensor]) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :96].contiguous()


def mix_types(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = weights["norm.weight"].float()


@pytest.mark.parametrize(
    ("fault", "keys"),
    [
        (rename, ["fc.weight", "context_proj.weight"]),
        (add_embedding, ["embed_tokens.weight"]),
        (cut_feature, ["fc.weight"]),
        (mix_types, ["dtype"]),
    ],
)
def test_a_broken_tensor_is_named(
    tmp_path: Path, fault: Callable[[dict[str, torch.Tensor]], None], keys: list[str]
) -> None:
    write_zlab(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    fault(weights)
    save_file(weights, tmp_path / "model.safetensors")
    assert named(lint(tmp_path)) == keys


def test_files_that_are_missing_or_cut_off_are_refused(tmp_path: Path) -> None:
    write_zlab(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    for cut in (content[: len(content) // 2], content[:20], b"\xff" * 40, b""):
        (tmp_path / "model.safetensors").write_bytes(cut)
        with pytest.raises(CheckpointError, match=r"model\.safetensors' cannot be read"):
            lint(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        lint(tmp_path / "absent")


FOREIGN = sorted(name for name, (_, _, readers) in ZLAB_FAULTS.items() if RINGDRAFT in readers)


@pytest.mark.parametrize("fault", FOREIGN)
def test_a_drafter_that_means_something_else_here_is_not_read(tmp_path: Path, fault: str) -> None:
    changes, key, _ = ZLAB_FAULTS[fault]
    change(write_zlab(tmp_path), changes)
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        read_spec(tmp_path)


def test_the_command_prints_each_finding_and_exits_1(tmp_path: Path) -> None:
    def command(folder: Path) -> tuple[int, str]:
        line = [sys.executable, "-m", "services.launcher.cli", "lint", str(folder)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    code, text = command(write_zlab(tmp_path))
    assert code == 0
    assert "no key" in text
    change(tmp_path, {"rope_theta": GONE, "is_causal": True})
    code, text = command(tmp_path)
    assert code == 1
    assert "rope_theta: got nothing, expected 10000.0" in text
    assert "is_causal: got True" in text
    assert repr(NOTHING) == "nothing"
    code, text = command(tmp_path / "absent")
    assert (code, "Traceback" in text, "config.json" in text) == (2, False, True)


ODD = (None, 0, -1, 1.5, True, "x", [], [{}], ["x"], [-1], {}, {"rope_type": []}, {"a": 1})


def every_key(config: Changes, prefix: str = "") -> list[str]:
    keys = [f"{prefix}{key}" for key in config]
    for key, value in config.items():
        if isinstance(value, dict):
            keys += every_key(value, f"{prefix}{key}.")
    return keys


@pytest.mark.parametrize("write", [write_zlab, write_other])
def test_values_of_any_type_are_findings_and_never_a_crash(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    write(tmp_path)
    whole = (tmp_path / "config.json").read_text(encoding="utf-8")
    for key in every_key(json.loads(whole)):
        for value in ODD:
            change(tmp_path, {key: value})
            try:
                lint(tmp_path)
                read_spec(tmp_path)
            except CheckpointError:
                pass
            except Exception as error:
                raise AssertionError(f"{key} = {value!r}") from error
            (tmp_path / "config.json").write_text(whole, encoding="utf-8")
