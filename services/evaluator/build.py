"""Puts together what all evaluations of a run share. Cheap refusals come before the target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.drafters.dflash.config import DrafterSpec
from common.target.loading import TargetDescription, describe_target, load_target, load_tokenizer
from services.evaluator.checkpoints import find_checkpoints, read_fitting_spec
from services.evaluator.config import EvaluatorConfig
from services.evaluator.decode import TextLimit, check_can_crop
from services.evaluator.prompts import Prompt, read_prompts
from services.evaluator.ties import tolerance_of


@dataclass(frozen=True)
class Bench:
    """The target, the prompts and the checkpoints."""

    target: TargetDescription
    model: PreTrainedModel
    prompts: list[Prompt]
    checkpoints: list[Path]
    limit: TextLimit
    tolerance: float
    """Relative gap under which two logits tie."""

    @property
    def embedding(self) -> Tensor:
        """[V, H]: raw, whatever the target's embedding module does with it."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        return self.model.get_output_embeddings().weight


def build_bench(config: EvaluatorConfig) -> Bench:
    """Read prompts and specs, then load the target."""
    table = config.evaluation
    if table.num_threads:
        torch.set_num_threads(table.num_threads)
    checkpoints = find_checkpoints(table.checkpoints, config.run.directory)
    target = describe_target(config.target)
    specs = [read_fitting_spec(checkpoint, target) for checkpoint in checkpoints]
    prompts = read_prompts(
        table.prompts,
        load_tokenizer(config.target),
        config.target.chat_template_kwargs,
        max_prompts=table.max_prompts,
        max_tokens=target.max_position_embeddings - _room_for_answer(config, specs),
    )
    dtype = _dtype_name(config)
    model = load_target(config.target.model_copy(update={"dtype": dtype}), config.run.device)
    check_can_crop(model)
    return Bench(
        target=target,
        model=model,
        prompts=prompts,
        checkpoints=checkpoints,
        limit=TextLimit(stop_token_ids(model), table.max_new_tokens),
        tolerance=tolerance_of(model.dtype, table.tie_tolerance),
    )


def stop_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end an answer, by the model's generation settings and its config."""
    found: set[int] = set()
    settings: list[Any] = [model.generation_config, model.config.get_text_config()]
    for ids in (getattr(setting, "eos_token_id", None) for setting in settings):
        found |= set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)


def _room_for_answer(config: EvaluatorConfig, specs: list[DrafterSpec]) -> int:
    """Return the positions behind a prompt that a last block may reach."""
    return config.evaluation.max_new_tokens + max(spec.block_size for spec in specs)


def _dtype_name(config: EvaluatorConfig) -> str:
    """Return the element type: a CPU's bfloat16 is slow, and rounds what is to be compared."""
    if config.evaluation.dtype != "auto":
        return config.evaluation.dtype
    return "float32" if config.run.device == "cpu" else config.target.dtype
