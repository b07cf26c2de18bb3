"""Targets of other families through real processes: trained on, or refused with code 2 and a way out."""

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.live_runs import Live
from tests.runs import make_run, run_to_end, segments_of, start, train
from tests.targets import make_tiny_target

TARGET = "services.target_server"
WORKER = "services.drafter_worker"


def replace_target(directory: Path, family: str = "llama", **settings: Any) -> Path:
    """Put another target in the place of a run's; return its weights' file."""
    shutil.rmtree(directory / "target")
    return make_tiny_target(directory / "target", family, **settings) / "model.safetensors"


@pytest.mark.parametrize("command", [TARGET, WORKER, "services.target_server.prepare"])
def test_an_untested_family_is_refused_before_its_weights_are_read(
    tmp_path: Path, command: str
) -> None:
    config = make_run(tmp_path, num_conversations=4)
    weights = replace_target(tmp_path, "granite")
    weights.write_bytes(b"no weights at all")
    done = run_to_end(command, "--config", config)
    assert done.returncode == 2, done.stderr
    for words in ("'granite'", "qwen3_moe", "target.allow_untested_target = true"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not segments_of(tmp_path)


FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "scaled embedding, images": ("gemma3", {}, ()),
    "capped logits": (
        "gemma2",
        {"final_logit_softcapping": 5.0},
        ("target.last_hidden_states_normed=true", "drafter.loss=kl"),
    ),
    "linear attention": ("qwen3_5", {}, ("target.last_hidden_states_normed=true",)),
    "head with a bias, half the rotary": ("phi", {}, ()),
}  # fmt: skip


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_tested_family_trains_and_goes_on(tmp_path: Path, kind: str) -> None:
    config = make_run(tmp_path, num_conversations=40)
    family, settings, options = FAMILIES[kind]
    replace_target(tmp_path, family, **settings)
    for epochs in (1, 2):
        (summary,) = train(config, f"data.data_epochs={epochs}", *options)
        account = summary["groups"]["main"]
        assert account["rows_trained"] == account["rows_published"] > 0
        assert not [text for text in summary["checks"].values() if text.startswith("warning")]
    (newest,) = sorted((tmp_path / "run" / "checkpoints" / "main" / "0").glob("step-*"))[-1:]
    drafter = json.loads((newest / "config.json").read_text())
    assert (drafter["hidden_size"], drafter["head_dim"]) == (32, 8)
    assert "partial_rotary_factor" not in drafter["rope_parameters"]


@pytest.mark.timeout(200)
def test_an_untested_family_trains_where_that_is_asked_for(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=20)
    replace_target(tmp_path, "granite", logits_scaling=2.0)
    (summary,) = train(config, "target.allow_untested_target=true")
    assert summary["groups"]["main"]["rows_lost"] == 0
    assert summary["checks"]["head"].startswith("warning: the target scales")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=4)
    replace_target(tmp_path, vocab_size=250)
    done = run_to_end(TARGET, "--config", config)
    assert done.returncode == 2, done.stderr
    assert "reach 279, expected less than the embedding's 250 rows" in done.stderr
    assert "target.model" in done.stderr
    assert "Traceback" not in done.stderr


def test_layers_unlike_the_drafters_do_not_start_it(tmp_path: Path) -> None:
    config = make_run(tmp_path, num_conversations=4)
    replace_target(tmp_path, "gemma2")
    done = run_to_end(WORKER, "--config", config, "--set", "drafter.init=target_layers")
    assert done.returncode == 2, done.stderr
    assert "'gemma2'" in done.stderr
    assert "drafter.init to 'random'" in done.stderr


@pytest.mark.timeout(120)
def test_the_control_plane_shows_what_a_failed_target_found(tmp_path: Path) -> None:
    config, run = make_run(tmp_path, num_conversations=4), tmp_path / "run"
    weights = replace_target(tmp_path)
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][280] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    control = start("services.control_plane", "--config", config, log=run / "logs" / "control.log")
    try:
        while not (run / "control.json").exists():
            time.sleep(0.05)
        done = run_to_end(TARGET, "--config", config)
        assert done.returncode == 2, done.stderr
        assert "embedding row 280 holds NaN or infinity" in done.stderr
        with contextlib.closing(Live(run)) as live:
            status = live.status()
    finally:
        control.kill()
        control.wait()
    (instance,) = status["target"]["instances"]
    assert instance["phase"] == "failed"
    checks = instance["report"]["checks"]
    assert checks["tokenizer"] == "280 ids, 300 embedding rows"
    assert checks["mask_row"].startswith("failed: embedding row 280")
    assert "target.mask_token_id" in status["errors"][0]["text"]
