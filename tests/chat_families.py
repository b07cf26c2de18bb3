"""Tokenizers with the makers' own chat templates: small vocabularies, the families' special tokens.

Only the templates are the makers' (tests/data/templates/README.md). A vocabulary is all bytes
and the merges of a few words; special tokens are single ids, and a tokenizer adds a BOS of its
own where the family's does.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from common.target.chat import RenderedConversation
from common.target.messages import Message
from tests.targets import CHATML

_TEMPLATES = Path(__file__).parent / "data" / "templates"
_WORDS = (
    "the quick brown fox jumps over the lazy dog and then the other dog <think>\n\n</think> " * 4
)


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer and template are made of."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    """Added tokens that are no special ones."""
    bos: str | None = None
    eos: str = ""
    is_metaspace: bool = False
    """Blanks are part of the text as U+2581, and bytes are a fallback."""
    trims_offsets: bool = False


FAMILIES = {
    "chatml": Family(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        trims_offsets=True,
    ),
    "qwen3": Family(
        "Qwen-Qwen3-0.6B.jinja",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        eos="<|im_end|>",
    ),
    "llama3": Family(
        "meta-llama-Llama-3.2-3B-Instruct.jinja",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        trims_offsets=True,
    ),
    "gemma2": Family(
        "google-gemma-2-2b-it.jinja",
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        is_metaspace=True,
    ),
    "mistral": Family(
        "mistralai-Mistral-Nemo-Instruct-2407.jinja",
        (
            "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
        ),
        bos="<s>",
        eos="</s>",
    ),
    "gpt_oss": Family(
        "openai-gpt-oss-120b.jinja",
        (
            "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
            "<|start|>", "<|end|>", "<|message|>", "<|call|>",
        ),
        eos="<|return|>",
    ),
}  # fmt: skip


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
END = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma2": "<end_of_turn>",
    "mistral": "</s>",
    "gpt_oss": "<|end|>",
}
LAST_END = END | {"gpt_oss": "<|return|>"}


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family, one object for all tests."""
    family = FAMILIES[name]
    backend = _metaspace_model() if family.is_metaspace else _byte_level_model()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in family.special]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    _add_post_processor(backend, family)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos
    )
    tokenizer.chat_template = (
        (_TEMPLATES / family.template).read_text(encoding="utf-8")
        if family.template.endswith(".jinja")
        else family.template
    )
    return tokenizer


def _byte_level_model() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_WORDS], trainer)
    return backend


def _metaspace_model() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = sorted({"\n", "▁", *"abcdefghijklmnopqrstuvwxyz"})
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    for token in [*letters, *("".join(merge) for merge in merges)]:
        vocabulary.setdefault(token, len(vocabulary))
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _add_post_processor(backend: Tokenizer, family: Family) -> None:
    steps = [processors.ByteLevel(trim_offsets=True)] if family.trims_offsets else []
    if family.bos:
        steps.append(
            processors.TemplateProcessing(
                single=f"{family.bos} $A",
                special_tokens=[(family.bos, backend.token_to_id(family.bos))],
            )
        )
    if steps:
        backend.post_processor = processors.Sequence(steps)


def user(content: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str | None, **keys: Any) -> Message:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content, **keys}


def tool_turns(arguments: Any, **keys: Any) -> list[Message]:
    """Return a question, a tool call, its result and an answer."""
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        user("How is it in Oslo?"),
        assistant(None, tool_calls=[call], **keys),
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"now": "<|im_end|> rain"}'},
        assistant("It rains."),
    ]


def supervised(tokenizer: PreTrainedTokenizerFast, rendered: RenderedConversation) -> list[str]:
    """Return the text of each run of tokens with mask 1."""
    pieces: list[list[int]] = []
    previous = 0
    for token, bit in zip(rendered.token_ids, rendered.loss_mask, strict=True):
        if bit and not previous:
            pieces.append([])
        if bit:
            pieces[-1].append(token)
        previous = bit
    return [tokenizer.decode(piece) for piece in pieces]
