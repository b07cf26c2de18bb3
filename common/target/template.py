"""The chat template of a target, and what it puts around the assistant's writing.

    ...question <closing> <header> <opening> answer...
                |         |        what the assistant writes before the text of its message:
                |         |        "<think>\n", "<tool_call>\n{\"name\": \""
                |         the template's: "<|im_start|>assistant\n", perhaps an empty think block
                what ends the user's turn

The parts are learnt from renders of small conversations with marks for texts, once a template.
"""

import json
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from common.errors import ConfigError, RowRejectedError
from common.target.messages import Message, with_reasoning

# Templates that show the day would give other tokens on another day; rows must not change.
DEFAULT_TODAY = "2025-01-01"
# What a template may raise on a row that it does not take.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError,
)  # fmt: skip
_RESERVED = frozenset(
    ("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "return_dict", "strftime_now")
)  # fmt: skip
_QUESTION, _TEXT, _THOUGHT, _NAME = (f"RingdraftProbe{part}" for part in "QTRN")
_USER: Message = {"role": "user", "content": _QUESTION}
_ANSWER: Message = {"role": "assistant", "content": _TEXT}
_CALL = {
    # Mistral's templates take ids of nine characters only.
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": {}}}
    ]
}
_OPENINGS: dict[str, tuple[Message, str]] = {
    "answer": (_ANSWER, _TEXT),
    "answer_and_call": (_ANSWER | _CALL, _TEXT),
    "call": ({"role": "assistant", "content": ""} | _CALL, _NAME),
    "reasoning": (_ANSWER | with_reasoning(_THOUGHT), _THOUGHT),
    "think_block": (_ANSWER | {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}"}, _THOUGHT),
}


def chat_template(tokenizer: Tokenizer, kwargs: dict[str, Any]) -> "ChatTemplate":
    """Return the tokenizer's template with these arguments; the same object for the same ones.

    The tokenizer must have all its tokens by then.
    """
    key = json.dumps(kwargs, sort_keys=True, default=str) if kwargs else "{}"
    return _cached(tokenizer, str(tokenizer.chat_template), key)


@lru_cache(maxsize=8)
def _cached(tokenizer: Tokenizer, _template: str, kwargs: str) -> "ChatTemplate":
    return ChatTemplate(tokenizer, json.loads(kwargs))


class ChatTemplate:
    """Renders messages; knows closing, headers and openings."""

    def __init__(self, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        for name in _RESERVED.intersection(kwargs):
            raise ConfigError(
                f"target.chat_template_kwargs.{name}: it belongs to each conversation or to the "
                f"renderer; remove it"
            )
        today = kwargs.get("today", DEFAULT_TODAY)
        try:
            strftime = date.fromisoformat(today).strftime
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"target.chat_template_kwargs.today got {today!r}, expected a date as 2025-01-31"
            ) from error
        self._kwargs = {**tokenizer.special_tokens_map, "strftime_now": strftime, **kwargs}
        self._source = tokenizer.get_chat_template()
        self._source_with_tools = tokenizer.get_chat_template(tools=[{}])
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.added_token_ids = frozenset(tokenizer.added_tokens_decoder)
        added = tokenizer.added_tokens_decoder.values()
        self.control_tokens = tuple(token.content for token in added if token.special)
        """Texts that become a turn's end or another control token wherever they stand."""

    @cached_property
    def encoder(self) -> FastTokenizer:
        """The bare tokenizer, of its own: no truncation, no special tokens, whole offsets."""
        encoder = FastTokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        encoder.no_truncation()
        encoder.no_padding()
        encoder.post_processor = None  # cuts blanks off offsets, and adds tokens
        return encoder

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render to text or raise `RowRejectedError`."""
        try:
            # What `apply_chat_template` calls, without its per-call look-ups.
            [text], _ = render_jinja_template(
                [messages],
                tools,
                chat_template=self._source if tools is None else self._source_with_tools,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise RowRejectedError("template_rejected", str(error)) from error
        return str(text)

    @cached_property
    def generation_prompt(self) -> str:
        """What the target is given behind the user's turn before it writes; may be empty."""
        return self._behind_question([_USER], add_generation_prompt=True) or ""

    @cached_property
    def headers(self) -> tuple[str, ...]:
        """What may stand between the user's turn and an answer, the longest first."""
        last = self._piece([_USER, _ANSWER], _TEXT)
        earlier = self._piece([_USER, _ANSWER, _USER, _ANSWER], _TEXT)
        found = {self.generation_prompt, last or "", earlier or ""}
        return tuple(sorted(found, key=len, reverse=True))

    @cached_property
    def end_of_call(self) -> str | None:
        """The token that ends a turn with tool calls."""
        try:
            text = self.render([_USER, _OPENINGS["call"][0]])
        except RowRejectedError:
            return None
        behind = text.rpartition(_NAME)[2]
        tokens = [str(token) for token in self._tokenizer.added_tokens_decoder.values()]
        last = max(tokens, key=behind.rfind, default="")
        return last if last and last in behind else None

    @cached_property
    def takes_think_blocks(self) -> bool:
        """Whether it takes think blocks in the text for reasoning; others leave them as text."""
        content = f"<think>{_THOUGHT}</think>{_TEXT}"
        try:
            return content not in self.render([_USER, _ANSWER | {"content": content}])
        except RowRejectedError:
            return False

    def opening(self, kind: str) -> str | None:
        """Return what the assistant writes before the first text of a turn; None: cannot be known.

        Args:
            kind: answer, answer_and_call, call, reasoning or think_block.
        """
        if kind not in self._openings:
            message, mark = _OPENINGS[kind]
            self._openings[kind] = self._without_header(self._piece([_USER, message], mark))
        return self._openings[kind]

    @cached_property
    def _openings(self) -> dict[str, str | None]:
        # A blank behind the generation prompt is one token with the word that follows.
        piece = self._piece([_USER, _ANSWER], _TEXT) or ""
        blank = piece.removeprefix(self.generation_prompt)
        return {"answer": blank if not blank.strip(" ") else ""}

    def _without_header(self, piece: str | None) -> str | None:
        if piece is None:
            return None
        return piece.removeprefix(next((h for h in self.headers if piece.startswith(h)), ""))

    @cached_property
    def _closing(self) -> str | None:
        try:
            text = self.render([_USER])
        except RowRejectedError:
            return None
        return text.partition(_QUESTION)[2]

    def _piece(self, messages: list[Message], mark: str) -> str | None:
        behind = self._behind_question(messages)
        return behind.partition(mark)[0] if behind is not None and mark in behind else None

    def _behind_question(
        self, messages: list[Message], *, add_generation_prompt: bool = False
    ) -> str | None:
        """Return what follows the user's turn; None where the template has no such place."""
        try:
            text = self.render(messages, add_generation_prompt=add_generation_prompt)
        except RowRejectedError:
            return None
        behind = text.partition(_QUESTION)[2]
        if self._closing is None or not behind.startswith(self._closing):
            return None
        return behind.removeprefix(self._closing)
