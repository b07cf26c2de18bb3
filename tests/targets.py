"""Tiny random targets with a real tokenizer and a ChatML template, saved as model folders.

The vocabulary is all bytes, the merges of a few words, and three ChatML tokens; the embedding
has spare rows behind it, the first of which serves as the mask token.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 300
NUM_LAYERS = 6
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = "the quick brown fox jumps over the lazy dog and then the other dog " * 4
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    # Three layers of linear attention before each one of full attention.
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}
_FAMILY_SETTINGS = {
    "qwen3_5": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
}


def make_tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 256 bytes, some merges and the ChatML tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 20,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_WORDS], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_tiny_target(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """Save a random model of `family` ("llama", "qwen3", "qwen3_5") and its tokenizer; return the folder."""
    config_class, model_class = _FAMILIES[family]
    tokenizer = make_tiny_tokenizer()
    seed = overrides.pop("seed", 0)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | _FAMILY_SETTINGS.get(family, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings | overrides))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
