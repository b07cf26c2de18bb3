"""An export is whole or not there, equal to its checkpoint, and refused where it would be misread."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.config.shared import TargetTable
from common.drafters.dflash.checkpoint import read_spec, write_drafter
from common.drafters.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION
from common.drafters.dflash.export import export
from common.drafters.dflash.lint import lint
from common.drafters.dflash.speculators import TargetReference
from common.errors import CheckpointError, ConfigError
from common.folders import whole_folder
from common.target.loading import describe_target
from services.drafter_worker.export import ExportTable, find_target
from tests.drafters import make_drafter, make_spec
from tests.runs import run_to_end
from tests.targets import make_tiny_target

TARGET = TargetReference("a/target", ("LlamaForCausalLM",))
MIXES = {
    "sliding": (SLIDING_ATTENTION, SLIDING_ATTENTION),
    "mixed": (SLIDING_ATTENTION, FULL_ATTENTION),
}


def make_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of float32 weights, so that rounding shows."""
    spec = make_spec(**changes)
    folder.mkdir()
    write_drafter(folder, make_drafter(spec).state_dict(), spec, "float32")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def change(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | values), encoding="utf-8")


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_weights_are_those_of_the_checkpoint_in_the_type_that_is_asked_for(
    tmp_path: Path, layout: Any, dtype: Any
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    files = export(checkpoint, tmp_path / "out", layout, dtype, TARGET)
    assert files == [tmp_path / "out" / name for name in ("config.json", "model.safetensors")]
    own, written = (load_file(p / "model.safetensors") for p in (checkpoint, tmp_path / "out"))
    assert set(own) == set(written)
    for name, value in own.items():
        assert torch.equal(written[name], value.to(getattr(torch, dtype))), name
    assert config_of(tmp_path / "out")["dtype"] == dtype
    assert lint(tmp_path / "out") == []
    assert beside(tmp_path) == ["checkpoint", "out"]


def test_an_older_checkpoint_of_another_trainer_comes_out_with_every_key(tmp_path: Path) -> None:
    spec = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **spec)
    before = read_spec(checkpoint)
    config = config_of(checkpoint)
    inner = {k: v for k, v in config["dflash_config"].items() if k != "block_size"}
    change(checkpoint, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0},
           dflash_config=inner, auto_map={"AutoModel": "dflash.DFlashDraftModel"})  # fmt: skip
    assert read_spec(checkpoint) == before
    assert {found.key for found in lint(checkpoint)} == {"auto_map", "dflash_config.block_size"}
    export(checkpoint, tmp_path / "out", "zlab", "bfloat16")
    assert read_spec(tmp_path / "out") == before
    assert lint(tmp_path / "out") == []


def test_layer_ids_and_tokens_are_counted_as_speculators_counts(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    export(checkpoint, tmp_path / "out", "speculators", "bfloat16", TARGET)
    config = config_of(tmp_path / "out")
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6]
    table = config["speculators_config"]
    assert table["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert table["verifier"] == {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]}
    # vLLM makes `causal` of its opposite, for full layers too.
    assert config["sliding_window_non_causal"] is True
    assert config["sample_from_anchor"] is False


@pytest.mark.parametrize("mix", MIXES)
def test_sliding_layers_are_refused_for_speculators_with_the_reason(
    tmp_path: Path, mix: str
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", layer_types=MIXES[mix], sliding_window=5)
    with pytest.raises(ConfigError, match="window begins at the anchor"):
        export(checkpoint, tmp_path / "out", "speculators", "bfloat16", TARGET)
    assert beside(tmp_path) == ["checkpoint"]
    export(checkpoint, tmp_path / "out", "zlab", "bfloat16")
    assert read_spec(tmp_path / "out").layer_types == MIXES[mix]


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out", "zlab", "bfloat16")
    stamp = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="choose another, or remove it"):
        export(checkpoint, tmp_path / "out", "zlab", "bfloat16")
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="choose another, or remove it"):
        export(checkpoint, checkpoint / "config.json", "zlab", "bfloat16")


def test_a_drafter_that_would_be_misread_everywhere_is_not_written(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", target_layer_ids=(5, 3, 1))
    with pytest.raises(CheckpointError, match="target_layer_ids: got"):
        export(checkpoint, tmp_path / "out", "zlab", "bfloat16")
    assert beside(tmp_path) == ["checkpoint"]


def test_weights_that_bfloat16_cannot_hold_are_not_written(tmp_path: Path) -> None:
    spec = make_spec()
    state = make_drafter(spec).state_dict()
    state["fc.weight"][0, 0] = torch.finfo(torch.float32).max
    (tmp_path / "checkpoint").mkdir()
    write_drafter(tmp_path / "checkpoint", state, spec, "float32")
    with pytest.raises(CheckpointError, match=r"'fc\.weight' holds NaN or infinity"):
        export(tmp_path / "checkpoint", tmp_path / "out", "zlab", "bfloat16")
    assert beside(tmp_path) == ["checkpoint"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"export '.*out' cannot be written"):
        export(checkpoint, checkpoint / "config.json" / "out", "zlab", "bfloat16")


def write_one(folder: Path, name: str, **options: bool) -> None:
    with whole_folder(folder, **options) as unfinished:
        (unfinished / name).touch()
        assert not folder.exists() or name not in beside(folder)
        if name == "fails":
            raise RuntimeError


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    place = tmp_path / "a"
    with pytest.raises(RuntimeError):
        write_one(place, "fails")
    assert beside(tmp_path) == []
    write_one(place, "first")
    with pytest.raises(OSError, match="not empty"):
        write_one(place, "second")
    assert beside(place) == ["first"]
    write_one(place, "second", replace=True)
    with pytest.raises(RuntimeError):
        write_one(place, "fails", replace=True)
    assert beside(place) == ["second"]
    assert beside(tmp_path) == ["a"]


def command(**table: object) -> tuple[int, str, str]:
    """Run what `ringdraft export` becomes."""
    options = [part for key, value in table.items() for part in ("--set", f"export.{key}={value}")]
    done = run_to_end("services.drafter_worker.export", *options)
    return done.returncode, done.stdout, done.stderr


def verb(*options: object) -> tuple[int, str, str]:
    """Run `ringdraft export`."""
    done = run_to_end("services.launcher.cli", "export", *map(str, options))
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def of_a_run(tmp_path: Path) -> Path:
    """Return a checkpoint that names its target, as a run's does."""
    target = make_tiny_target(tmp_path / "target", hidden_size=48, head_dim=12)
    checkpoint = make_checkpoint(
        tmp_path / "checkpoint", vocab_size=300, num_target_layers=6, target_layer_ids=(1, 3)
    )
    fingerprint = describe_target(TargetTable(model=str(target))).fingerprint
    run = {"config": {"target": {"model": str(target)}}, "target_fingerprint": fingerprint}
    (checkpoint / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return checkpoint


def test_the_command_takes_the_runs_own_target_and_names_what_it_wrote(
    tmp_path: Path, of_a_run: Path
) -> None:
    out = tmp_path / "new" / "out"
    code, stdout, stderr = command(checkpoint=of_a_run, to="speculators", out=out)
    assert (code, stderr) == (0, "")
    summary = json.loads(stdout)
    assert summary["directory"] == str(out)
    assert set(summary["files"]) == {"config.json", "model.safetensors", "run.json"}
    assert summary["files"]["config.json"] == (out / "config.json").stat().st_size
    verifier = config_of(out)["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(tmp_path / "target")
    assert verifier["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_is_named_in_full_to_readers(
    tmp_path: Path, of_a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = ExportTable(checkpoint=of_a_run, to="speculators", out=Path("out"), target="target")
    assert find_target(table, read_spec(of_a_run)).name == str(tmp_path / "target")


def test_the_command_refuses_another_target_in_one_line(tmp_path: Path, of_a_run: Path) -> None:
    other = make_tiny_target(tmp_path / "other", hidden_size=32)
    code, stdout, stderr = verb(
        "--checkpoint", of_a_run, "--to", "speculators", "--out", tmp_path / "out",
        "--target", other,
    )  # fmt: skip
    assert (code, stdout) == (2, "")
    assert "hidden_size got 48, expected 32" in stderr
    assert "Traceback" not in stderr
    (of_a_run / "run.json").unlink()
    code, _, stderr = command(checkpoint=of_a_run, to="speculators", out=tmp_path / "out")
    assert (code, "--target" in stderr) == (2, True)
    assert not (tmp_path / "out").exists()
