"""What a worker takes of its target before the first row."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from common.config.loading import load
from common.contracts.rows import RowSchema
from common.errors import ConfigError
from common.target.loading import describe_target
from services.drafter_worker.build import build_objective, build_trainee, check_schema, make_spec
from services.drafter_worker.checkpoint import CheckpointStore
from services.drafter_worker.config import WorkerConfig
from tests.targets import CHATML, make_tiny_target


def config_for(target: Path, *settings: str) -> WorkerConfig:
    options = [
        f"target.model={target}", "target.num_aux_layers=2", "drafter.num_layers=1",
        "drafter.block_size=4", "drafter.num_anchors=16", *settings,
    ]  # fmt: skip
    return load(WorkerConfig, [], options, {})


def test_a_targets_cap_is_the_objectives(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", "gemma2", final_logit_softcapping=5.0)
    config = config_for(target, "target.last_hidden_states_normed=true", "drafter.loss=kl")
    trainee = build_trainee(config, CheckpointStore(tmp_path / "checkpoints", 2))
    schema = RowSchema(
        row_tokens=128, max_documents=4, hidden_size=32, target_layer_ids=(1, 3),
        aux_dtype="bfloat16", has_last_hidden_states_normed=True, target_fingerprint="t",
        template_fingerprint="t", feature_engine="t",
    )  # fmt: skip
    assert build_objective(config, trainee, schema).target_softcap == 5.0


def test_the_mask_lies_behind_the_last_id_where_ids_have_gaps(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target")
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 290}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(target)
    config = config_for(target)
    assert make_spec(config, describe_target(config.target)).mask_token_id == 291


def test_rows_with_other_layers_are_refused_by_the_group_s_name(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target")
    config = config_for(target, "training.group=wide", "groups.wide.drafter.block_size=8")
    trainee = build_trainee(config, CheckpointStore(tmp_path / "checkpoints", 2))
    assert trainee.spec.block_size == 8
    schema = RowSchema(
        row_tokens=128, max_documents=4, hidden_size=32, target_layer_ids=(0, 1),
        aux_dtype="bfloat16", has_last_hidden_states_normed=False,
        target_fingerprint=trainee.target.fingerprint, template_fingerprint="t", feature_engine="t",
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"group 'wide'.*target_layer_ids got \(0, 1\).*\[target\]"
    ):
        check_schema(schema, config, trainee)
