"""Finds where in a rendered conversation the assistant's own writing lies.

The texts are found by a second render with marks in their place: the pieces between the marks
are the template's, and pieces and texts must make up the whole render exactly. Reasoning and
tool calls, which templates dress in many ways, begin where the generation prompt of the messages
before them ends, provided that this render is how the whole one begins.
"""

from typing import Any, Protocol

from common.errors import RowRejectedError

_MARK = "RingdraftTurn{}Mark"
_THINK_END = "</think>"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]
Span = tuple[int, int]


class Render(Protocol):
    """The chat template: messages to text."""

    def __call__(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Render the messages or raise `RowRejectedError`."""


def written_spans(render: Render, messages: list[Message], text: str) -> list[Span]:
    """Return the characters of `text`, the whole render, that the assistant wrote.

    The token that ends a turn lies behind its span, or at its end where the turn calls tools.
    """
    answers = _answer_spans(render, messages, text)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if message.get("tool_calls"):
            spans.append(_tool_call_span(render, messages[: index + 1], text))
            continue
        start, stop = answers[index]
        if _has_reasoning(message):
            # Where the template drops the reasoning of an earlier turn, nothing lies in between.
            start = _pulled_back(render, messages[:index], text, start, lowest=0)
        elif text[start - 1] == " ":
            # A blank behind the generation prompt is one token with the word that follows.
            lowest = len(text[:start].rstrip(" "))
            start = _pulled_back(render, messages[:index], text, start, lowest)
        spans.append((start, stop))
    return spans


def _answer_spans(render: Render, messages: list[Message], text: str) -> dict[int, Span]:
    """Return where the text of each assistant message lies, without reasoning, by its index."""
    marked = list(messages)
    answers: dict[int, str] = {}
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not message.get("tool_calls"):
            reasoning, answers[index] = _split_reasoning(message["content"])
            marked[index] = {**message, "content": reasoning + _MARK.format(index)}
    first, *pieces = _split_at_marks(render(marked), list(answers))
    position = len(first)
    spans = {}
    for (index, answer), piece in zip(answers.items(), pieces, strict=True):
        trimmed = _as_rendered(answer, piece, text, position)
        if trimmed is None or not text.startswith(first):
            raise _altered(index)
        spans[index] = (position, position + len(trimmed))
        position += len(trimmed) + len(piece)
    return spans


def _split_at_marks(rendered: str, indices: list[int]) -> list[str]:
    pieces = []
    for index in indices:
        piece, mark, rendered = rendered.partition(_MARK.format(index))
        if not mark:
            raise _altered(index)
        pieces.append(piece)
    return [*pieces, rendered]


def _as_rendered(answer: str, piece: str, text: str, position: int) -> str | None:
    """Return the answer as the template trimmed it: what lies at `position` and before `piece`."""
    trims = (answer, answer.rstrip(), answer.lstrip(), answer.strip(),
             answer.rstrip("\n"), answer.lstrip("\n"), answer.strip("\n"))  # fmt: skip
    return next((trim for trim in trims if text.startswith(trim + piece, position)), None)


def _pulled_back(render: Render, before: list[Message], text: str, start: int, lowest: int) -> int:
    """Return the end of the generation prompt of the messages before, from `lowest` to `start`."""
    prompt = _length_of_prefix(render, before, text)
    return start if prompt is None else min(start, max(prompt, lowest))


def _tool_call_span(render: Render, turn: list[Message], text: str) -> Span:
    start = _length_of_prefix(render, turn[:-1], text)
    stop = _length_of_prefix(render, turn, text)
    if start is None or stop is None:
        raise RowRejectedError(
            "template_not_a_prefix",
            f"message {len(turn) - 1} calls tools and renders differently in the whole conversation",
        )
    return start, len(text[:stop].rstrip())


def _length_of_prefix(render: Render, messages: list[Message], text: str) -> int | None:
    """Return how long `messages` alone render, where that is how `text` begins.

    Ends with the generation prompt where the assistant is next to write.
    """
    if not messages:
        return None
    prefix = render(messages, add_generation_prompt=messages[-1]["role"] != "assistant")
    return len(prefix) if text.startswith(prefix) else None


def _altered(index: int) -> RowRejectedError:
    return RowRejectedError(
        "template_alters_text",
        f"the template does not render the text of message {index} once and as it is",
    )


def _has_reasoning(message: Message) -> bool:
    return _THINK_END in message["content"] or any(message.get(key) for key in _REASONING_KEYS)


def _split_reasoning(content: str) -> tuple[str, str]:
    """Split text behind its last think block and the blank lines that follow it."""
    start = content.rfind(_THINK_END)
    if start < 0:
        return "", content
    start += len(_THINK_END)
    start += len(content[start:]) - len(content[start:].lstrip())
    return content[:start], content[start:]
