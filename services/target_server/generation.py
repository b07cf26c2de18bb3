"""Writes answers with the target: plain batched generation by transformers, padded on the left.

A batch's padding is masked out and its positions start behind it, so that a greedy answer does
not depend on its neighbours beyond rounding.
"""

from dataclasses import dataclass

import torch
import xxhash
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """What the target wrote, and whether it stopped by itself ("stop") or was cut ("length")."""

    content: str
    finish_reason: str
    num_tokens: int


class AnswerWriter:
    """The target, its tokenizer and how to sample; answers one batch a call."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, *, max_new_tokens: int,
        temperature: float, seed: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._tokenizer = tokenizer
        self._seed = seed
        self._eos_ids = _end_ids(model)
        self._settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self._eos_ids),
            pad_token_id=min(self._eos_ids),
            repetition_penalty=1.0,
            **_sampling(temperature),
        )

    @torch.no_grad()
    def answer(self, prompts: list[list[int]]) -> list[Answer]:
        """Write an answer to each prompt of token ids."""
        token_ids, attention_mask = _pad_left(prompts, self._settings.pad_token_id)
        torch.manual_seed(self._seed ^ xxhash.xxh32_intdigest(token_ids.numpy().tobytes()))
        device = self._model.device
        written = self._model.generate(
            input_ids=token_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=self._settings,
        )[:, token_ids.shape[1] :]
        return [self._read(row) for row in written.tolist()]

    def _read(self, row: list[int]) -> Answer:
        stop = next((i for i, token in enumerate(row) if token in self._eos_ids), None)
        content = self._tokenizer.decode(
            row[:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if stop is None:
            return Answer(content, "length", len(row))
        return Answer(content, "stop", stop + 1)


def _sampling(temperature: float) -> dict[str, object]:
    """Plain sampling or greedy, whatever the model's own generation defaults are."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}


def _end_ids(model: PreTrainedModel) -> set[int]:
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


def _pad_left(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids in prompts)
    token_ids = torch.full((len(prompts), width), pad)
    attention_mask = torch.zeros_like(token_ids)
    for row, ids in enumerate(prompts):
        token_ids[row, width - len(ids) :] = torch.tensor(ids)
        attention_mask[row, width - len(ids) :] = 1
    return token_ids, attention_mask
