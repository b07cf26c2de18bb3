"""Puts together what all evaluations of a run share. Cheap refusals come before the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.drafters.dflash.checkpoint import check_tensors
from common.drafters.dflash.config import DrafterSpec
from common.errors import CheckpointError, ConfigError
from common.target.loading import TargetDescription, describe_target, load_target, load_tokenizer
from common.target.row_cache import check_can_forget
from common.target.turns import end_of_turn_ids
from services.evaluator.checkpoints import read_fitting_spec
from services.evaluator.config import EvaluatorConfig
from services.evaluator.decode import Request, TextLimit
from services.evaluator.prompts import Prompt, read_prompts
from services.evaluator.ties import tolerance_of


@dataclass(frozen=True)
class Arm:
    """The prompts, asked in one way and answered at one temperature."""

    name: str
    temperature: int
    is_headline: bool
    prompts: list[Prompt]
    seed: int

    @property
    def title(self) -> str:
        """What tells it from the others; empty for the headline."""
        return "" if self.is_headline else f"-{self.name}-t{self.temperature}"

    @property
    def requests(self) -> list[Request]:
        """The prompts, each with a seed of its own."""
        return [
            Request(prompt.token_ids, (self.seed % (1 << 31) << 32) + number)
            for number, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True)
class Bench:
    """The target and the prompts."""

    target: TargetDescription
    model: PreTrainedModel
    arms: list[Arm]
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

    @property
    def longest_text(self) -> int:
        """Most tokens of a prompt with its answer."""
        longest = max(len(prompt.token_ids) for arm in self.arms for prompt in arm.prompts)
        return longest + self.limit.max_new_tokens


def build_bench(config: EvaluatorConfig, checkpoints: Sequence[Path]) -> Bench:
    """Read prompts and the specs of the first checkpoints, then load the target."""
    table = config.evaluation
    if table.num_threads:
        torch.set_num_threads(table.num_threads)
    target = describe_target(config.target)
    specs = [_checked(checkpoint, target) for checkpoint in checkpoints]
    arms = _arms(config, target, load_tokenizer(config.target), specs)
    dtype = _dtype_name(config)
    model = load_target(config.target.model_copy(update={"dtype": dtype}), config.run.device)
    check_can_forget(model)
    return Bench(
        target=target,
        model=model,
        arms=arms,
        limit=TextLimit(frozenset(end_of_turn_ids(model)), table.max_new_tokens),
        tolerance=tolerance_of(model.dtype, table.tie_tolerance),
    )


def _checked(checkpoint: Path, target: TargetDescription) -> DrafterSpec:
    try:
        spec = read_fitting_spec(checkpoint, target)
        check_tensors(checkpoint, spec)
    except CheckpointError as error:  # of a config that the user gave
        raise ConfigError(str(error)) from error
    return spec


def _arms(
    config: EvaluatorConfig,
    target: TargetDescription,
    tokenizer: Tokenizer,
    specs: Sequence[DrafterSpec],
) -> list[Arm]:
    table = config.evaluation
    # Behind an answer a last block may reach.
    room = table.max_new_tokens + max(spec.block_size for spec in specs)
    arms: list[Arm] = []
    for name, arm in table.arms.items():
        kwargs: dict[str, Any] = config.target.chat_template_kwargs | arm.chat_template_kwargs
        prompts = read_prompts(
            table.prompt_sources,
            tokenizer,
            kwargs,
            max_prompts=table.max_prompts,
            max_tokens=target.max_position_embeddings - room,
        )
        arms += [
            Arm(name, temperature, is_headline=False, prompts=prompts, seed=config.run.seed)
            for temperature in table.temperature
        ]
    first = arms[0]
    return [Arm(first.name, first.temperature, True, first.prompts, first.seed), *arms[1:]]


def _dtype_name(config: EvaluatorConfig) -> str:
    """Return the element type: a CPU's bfloat16 is slow, and rounds what is to be compared."""
    if config.evaluation.dtype != "auto":
        return config.evaluation.dtype
    return "float32" if config.run.device == "cpu" else config.target.dtype
