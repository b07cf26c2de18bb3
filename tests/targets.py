"""Tiny random targets with a real tokenizer and a ChatML template, saved as model folders.

The vocabulary is all bytes, the merges of a few words, and three ChatML tokens; the embedding
has spare rows behind it, the first of which serves as the mask token.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
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
# Three layers of linear attention before each one of full attention.
_HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
}
_FAMILY_SETTINGS = {
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _EXPERTS | _SHARED_EXPERT,
    "qwen3_next": _HYBRID | _EXPERTS | _SHARED_EXPERT,
    "qwen3_moe": _EXPERTS,
    "gemma2": _WINDOWS | {"query_pre_attn_scalar": 8},
    "gemma3": _WINDOWS | {"query_pre_attn_scalar": 8},
    "gemma3_text": _WINDOWS | {"query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gpt_oss": _WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"no_rope_layer_interval": 2},
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_position_embeddings": 4,
}
# Models that read images too, by the config that holds their text part.
_WITH_IMAGES = {
    "gemma3": (Gemma3Config, Gemma3ForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
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
    """Save a random model of `family`, a `model_type`, and its tokenizer; return the folder."""
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
        model = _make_model(family, settings | overrides)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _make_model(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    if family not in _WITH_IMAGES:
        config: PreTrainedConfig = AutoConfig.for_model(family, **settings)
        return AutoModelForCausalLM.from_config(config)
    config_class, model_class = _WITH_IMAGES[family]
    tied = settings["tie_word_embeddings"]
    config = config_class(text_config=settings, vision_config=_VISION, tie_word_embeddings=tied)
    return model_class(config)
