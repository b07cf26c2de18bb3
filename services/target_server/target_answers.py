"""Has this process's own target answer dialogues, in batches of prompts of about one length."""

import re
import threading
from collections.abc import Iterator
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.errors import ConfigError, RowRejectedError
from common.target.chat import render_prompt
from common.target.loading import load_target, load_tokenizer
from services.target_server.dialogues import Dialogue, Message, Reply, Sink
from services.target_server.generation import Answer, AnswerWriter, Request
from services.target_server.regeneration_config import RegenerateConfig
from services.target_server.seeds import answer_seed

_WINDOW_BATCHES = 32
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
# Targets whose answers are several messages in one: texts alone cannot be told apart.
_CHANNEL_TOKEN = "<|channel|>"


def answer_by_target(
    config: RegenerateConfig, sink: Sink, waiting: Iterator[Dialogue], stop: threading.Event
) -> None:
    """Load the target and answer dialogues until none is left or a stop is asked for."""
    if config.target is None:
        raise ConfigError("regeneration without a server: set target.model")
    if config.run.num_threads:
        torch.set_num_threads(config.run.num_threads)
    tokenizer = load_tokenizer(config.target)
    if _CHANNEL_TOKEN in tokenizer.get_vocab():
        raise ConfigError(
            f"target.model={config.target.model!r} writes in channels ({_CHANNEL_TOKEN}), which only "
            f"its server takes apart; serve it and set regeneration.server"
        )
    model = load_target(config.target, config.run.device)
    room = model.config.get_text_config().max_position_embeddings
    run = _TargetRun(config, tokenizer, AnswerWriter(model, config.generation), room, sink)
    while not stop.is_set():
        window = list(islice(waiting, _WINDOW_BATCHES * config.generation.batch_size))
        if not window:
            break
        run.answer(window, stop)


class _TargetRun:
    """The target, and what its dialogues become."""

    def __init__(
        self, config: RegenerateConfig, tokenizer: Tokenizer, writer: AnswerWriter, room: int,
        sink: Sink,
    ) -> None:  # fmt: skip
        assert config.target is not None
        self._kwargs = config.target.chat_template_kwargs
        self._seed = config.run.seed
        self._limit = config.generation.max_new_tokens
        self._tokenizer, self._writer, self._room, self._sink = tokenizer, writer, room, sink
        self._splits_reasoning = "reasoning_content" in str(tokenizer.chat_template)

    def answer(self, dialogues: list[Dialogue], stop: threading.Event) -> None:
        """Write every turn of each; those of one round go by length."""
        while dialogues and not stop.is_set():
            asked = [(d, request) for d in dialogues if (request := self._request(d)) is not None]
            asked.sort(key=lambda pair: len(pair[1].token_ids))
            for start in range(0, len(asked), self._writer.batch_size):
                batch = asked[start : start + self._writer.batch_size]
                answers = self._writer.answer([request for _, request in batch], stop)
                if answers is None:
                    return
                for (dialogue, _), answer in zip(batch, answers, strict=True):
                    self._take(dialogue, answer)
            dialogues = [dialogue for dialogue, _ in asked if not dialogue.is_done]

    def _request(self, dialogue: Dialogue) -> Request | None:
        try:
            token_ids = render_prompt(
                self._tokenizer, dialogue.messages, self._kwargs, tools=dialogue.tools
            )
            if len(token_ids) >= self._room:
                raise RowRejectedError("too_long", f"{len(token_ids)} tokens of {self._room}")
        except RowRejectedError as error:
            self._sink.skip(error, dialogue.id)
            return None
        limit = min(self._limit, self._room - len(token_ids))
        return Request(token_ids, answer_seed(self._seed, dialogue.id, dialogue.turn), limit)

    def _take(self, dialogue: Dialogue, answer: Answer) -> None:
        ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        message = _message(text, splits_reasoning=self._splits_reasoning)
        dialogue.take(Reply(message, answer.finish_reason, len(answer.token_ids)))
        if dialogue.is_done:
            self._sink.add(dialogue)


def _message(text: str, *, splits_reasoning: bool) -> Message:
    """Return an answer as a message; its reasoning apart where the template knows the key."""
    thought = _THOUGHT.match(text) if splits_reasoning else None
    if thought is None or not thought[1].strip():
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text[thought.end() :],
        "reasoning_content": thought[1].strip("\n"),
    }
