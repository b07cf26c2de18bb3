"""What decoding a batch of turns needs to know: how they begin together, and which tokens end them."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError


def end_of_turn_ids(model: PreTrainedModel) -> set[int]:
    """Collect the ids that end a turn; the tokenizer's own eos may be another one."""
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        value = config.eos_token_id
        found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    if not found:
        raise ConfigError(
            f"target of type {model.config.model_type!r} names no eos_token_id in its config, so no "
            f"answer would end; add it to the model's generation_config.json"
        )
    return found


def pad_left(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return token ids and, for each, 1 where it is the prompt's: both [rows, longest] int64."""
    width = max(len(ids) for ids in prompts)
    token_ids = torch.full((len(prompts), width), pad)
    is_prompt = torch.zeros_like(token_ids)
    for row, ids in enumerate(prompts):
        token_ids[row, width - len(ids) :] = torch.tensor(ids)
        is_prompt[row, width - len(ids) :] = 1
    return token_ids, is_prompt
