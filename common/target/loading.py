"""Describes and loads the target, and settles which layers and which mask token a run uses.

`describe_target` reads the config alone; only `load_target` reads weights. A target is loaded
once a process, frozen, in evaluation mode. Whatever the files or the settings lack is a
`ConfigError` that names the setting.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar

from common.config.shared import TargetTable
from common.errors import ConfigError
from common.target.families import (
    TargetFamily,
    attention_of,
    family_of,
    fixed_rope,
    logit_softcap_of,
)
from common.target.files import TargetFiles, locate


@dataclass(frozen=True)
class TargetDescription:
    """Shape and identity of a target, from its config."""

    model: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding, which may be more than the tokenizer has tokens."""
    rms_norm_eps: float
    rope: dict[str, Any]
    """Its rotary embedding as far as a drafter can take it over: rope_type, rope_theta, scaling."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Hash of the config and of samples of the weights."""
    family: TargetFamily
    attention: str | None
    """Attention of transformers that it is loaded with; None: transformers' choice."""
    logit_softcap: float
    """c of its logits c * tanh(logits / c); 0 where they are not capped."""


def describe_target(table: TargetTable) -> TargetDescription:
    """Return the target's shape and identity without loading its weights; refuse an untested one."""
    files = locate(table)
    config = _text_config(table, files)
    family = family_of(config, table)
    num_heads = config.num_attention_heads
    return TargetDescription(
        model=str(files.path),
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=_first(config, ("num_key_value_heads",), num_heads),
        head_dim=_first(config, ("head_dim",), config.hidden_size // num_heads),
        intermediate_size=_first(config, ("intermediate_size", "n_inner"), 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        rms_norm_eps=_first(config, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-6),
        rope=fixed_rope(config),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        bos_token_ids=_ids(config.bos_token_id),
        eos_token_ids=_ids(config.eos_token_id),
        fingerprint=files.fingerprint(),
        family=family,
        attention=attention_of(config, family),
        logit_softcap=logit_softcap_of(config),
    )


def load_target(table: TargetTable, device: torch.device | str) -> PreTrainedModel:
    """Load the causal LM, frozen, on `device`; a GGUF file is dequantised."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    files = locate(table)
    config = _text_config(table, files)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **files.source,
            dtype=getattr(torch, table.dtype),
            attn_implementation=attention_of(config, family_of(config, table)),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"target.model {table.model!r} cannot be loaded: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(table: TargetTable) -> Tokenizer:
    """Load the tokenizer; it must be a fast one and have a chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(**locate(table).source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"target.model {table.model!r}: tokenizer cannot be loaded: {error}"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"target.model {table.model!r}: got a slow tokenizer, expected one with a "
            f"tokenizer.json, whose character offsets the loss mask needs"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"target.model {table.model!r}: its tokenizer has no chat template; "
            f"put a chat_template.jinja beside the tokenizer"
        )
    # Some files ask for it; on byte-level text it would eat blanks before punctuation.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def default_target_layer_ids(num_layers: int, num_aux_layers: int) -> tuple[int, ...]:
    """Spread `num_aux_layers` ids from layer 1 to layer num_layers - 3, as z-lab's drafters do."""
    if num_aux_layers == 1:
        return (num_layers // 2,)
    span = num_layers - 4
    return tuple(round(1 + i * span / (num_aux_layers - 1)) for i in range(num_aux_layers))


def resolve_target_layer_ids(table: TargetTable, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose output is kept: the listed ones, or the default spread."""
    listed = table.target_layer_ids
    ids = listed or default_target_layer_ids(num_layers, table.num_aux_layers)
    problem = _problem_with_layer_ids(ids, num_layers)
    if problem is None:
        return ids
    if listed:
        raise ConfigError(
            f"target.target_layer_ids={list(ids)}: {problem}; "
            f"list rising ids from 0 to {num_layers - 2}"
        )
    feasible = [
        count
        for count in range(1, table.num_aux_layers)
        if _problem_with_layer_ids(default_target_layer_ids(num_layers, count), num_layers) is None
    ]
    way_out = f"set target.num_aux_layers={feasible[-1]} or " if feasible else ""
    raise ConfigError(
        f"target.num_aux_layers={table.num_aux_layers}: a target of {num_layers} layers is too "
        f"shallow, the default ids would be {list(ids)} ({problem}); {way_out}list "
        f"target.target_layer_ids"
    )


def resolve_mask_token_id(table: TargetTable, num_token_ids: int, vocab_size: int) -> int:
    """Return the embedding row of the drafter's mask slots; a token in use is never taken."""
    chosen = table.mask_token_id
    if chosen == -1:
        if num_token_ids < vocab_size:
            return num_token_ids
        raise ConfigError(
            f"target.mask_token_id=-1: the tokenizer's {num_token_ids} tokens fill all "
            f"{vocab_size} rows of the embedding, so there is no spare row; set "
            f"target.mask_token_id to a token that never occurs in the data (a reserved one)"
        )
    if not 0 <= chosen < vocab_size:
        raise ConfigError(
            f"target.mask_token_id={chosen}: got no row of the embedding, expected 0 to "
            f"{vocab_size - 1}; correct it, or -1 for the first row behind the tokenizer"
        )
    return chosen


def num_token_ids(tokenizer: Tokenizer) -> int:
    """Return the tokenizer's last id + 1, which is its length unless its ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _text_config(table: TargetTable, files: TargetFiles) -> Any:
    try:
        return AutoConfig.from_pretrained(**files.source).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"target.model {table.model!r}: config cannot be read: {error}"
        ) from error


def _problem_with_layer_ids(ids: tuple[int, ...], num_layers: int) -> str | None:
    if not all(0 <= layer < num_layers for layer in ids):
        return f"an id is out of range for {num_layers} layers"
    if len(set(ids)) < len(ids):
        return "an id occurs twice"
    if list(ids) != sorted(ids):
        return "the ids do not rise"
    # Engines disagree on whether the last layer's output has passed the final norm.
    if ids[-1] == num_layers - 1:
        return "the last layer's output cannot be a feature"
    return None


def _first(config: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    """Return the first of several keys by which model families name the same thing."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return otherwise


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
