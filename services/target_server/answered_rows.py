"""Rows of prompts and the answers that the target writes to them, for `data.source = "prompts"`.

    prompts in order -> a few batches, by length -> answers -> Packer -> journal -> row

The rings of a run share its prompts out: each answers and packs its own, into its own sequences.
The loss mask is 1 on the answer: on its end of turn too, where the target wrote one. A row's ids
are those that were generated; they are never rendered or tokenized again.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from common.contracts.sequences import ONE_RING, Shard
from common.disk import write_with_patience
from common.errors import ConfigError, RowRejectedError
from common.target.chat import render_prompt
from services.target_server.conversations import Conversations
from services.target_server.counts import SampleCounts
from services.target_server.data_config import DataTable
from services.target_server.generation import Answer, AnswerWriter, Request
from services.target_server.inputs.formats import Pretokenised, read_conversation
from services.target_server.inputs.mixture import source_of
from services.target_server.packing import PackedRow, Packer, RecordedRow, Sample, make_row, pack
from services.target_server.plain_json import check_text
from services.target_server.recipe_journal import Recipe, RecipeJournal
from services.target_server.seeds import answer_seed

# An anchor is a supervised token with a supervised successor.
_SHORTEST_ANSWER = 2
_WINDOW_BATCHES = 4


class Prompts(Conversations):
    """Conversations up to their last question; each is a sample without supervised tokens."""

    def samples_of(self, sample_id: int, row: dict) -> list[Sample]:
        """Return the prompt of one row, or raise `RowRejectedError`."""
        source = source_of(sample_id)
        conversation = read_conversation(row, self._formats[source])
        if isinstance(conversation.content, Pretokenised):
            raise RowRejectedError("no_messages", "got token ids, expected messages or a prompt")
        roles = [message["role"] for message in conversation.content]
        if "user" not in roles:
            raise RowRejectedError("no_user_turn", "nothing in it asks for an answer")
        num_answers = next(i for i, role in enumerate(reversed(roles)) if role != "assistant")
        asked = conversation.content[: len(roles) - num_answers]
        check_text([asked, conversation.tools])
        ids = render_prompt(self._tokenizer, asked, self._template_kwargs, tools=conversation.tools)
        if len(ids) > self._table.row_tokens - _SHORTEST_ANSWER:
            raise RowRejectedError(
                "too_long",
                f"got a prompt of {len(ids)} tokens, expected at most "
                f"{self._table.row_tokens - _SHORTEST_ANSWER}",
            )
        token_ids = np.array(ids, dtype=np.int32)
        return [Sample(sample_id, self._tags[source], token_ids, np.zeros(len(ids), np.uint8))]


class AnsweredRows:
    """The rows of a run, by sequence."""

    def __init__(
        self, prompts: Prompts, writer: AnswerWriter, table: DataTable, *,
        max_new_tokens: int, seed: int, journal: RecipeJournal | None, stop: threading.Event,
    ) -> None:  # fmt: skip
        """`journal` None: the rows are made once, and nothing goes on from them."""
        self._prompts, self._writer, self._table = prompts, writer, table
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._journal, self._stop = journal, stop
        self.counts = SampleCounts()
        """What became of the prompts so far."""

    def rows(self, start: int = 0, shard: Shard = ONE_RING) -> Iterator[PackedRow | RecordedRow]:
        """Yield the rows of one ring from sequence `start` on, those of an earlier process first.

        Ends early where a stop is asked for.
        """
        recorded = self._journal.recipes if self._journal else []
        for recipe in recorded:
            if recipe.sequence >= start:
                yield RecordedRow(recipe.sequence, partial(self._make_again, recipe))
        number = max(shard.num_below(start), len(recorded))
        for data_epoch in range(self._table.data_epochs):
            done = Counter(i for r in recorded if r.data_epoch == data_epoch for i in r.sample_ids)
            packer: Packer[Sample] = Packer(
                self._table.row_tokens, self._table.max_documents, self._table.packing_window
            )
            for samples in pack(packer, self._answered(data_epoch, shard, done)):
                if self._stop.is_set():  # what is open is not the end of the epoch
                    return
                sequence = shard.to_global(number)
                ids = tuple(sample.sample_id for sample in samples)
                if self._journal:
                    recipe = Recipe(sequence=sequence, data_epoch=data_epoch, sample_ids=ids)
                    write_with_patience(partial(self._journal.append, recipe), self._stop)
                yield make_row(samples, self._table.row_tokens, sequence, data_epoch)
                number += 1
        # A ring without a row may be one that there was no prompt for.
        if number == 0 and self.counts.skipped.total and not self._stop.is_set():
            raise ConfigError(
                f"data: none of the prompts has an answer to train on ({self.counts.skipped}); "
                f"check the files, the target's chat template and [generation]"
            )

    def _answered(self, data_epoch: int, shard: Shard, done: Counter[int]) -> Iterator[Sample]:
        """Answer the ring's prompts of one pass that no recorded row has."""
        waiting: list[Sample] = []
        for number, row in enumerate(self._prompts.rows(data_epoch)):
            if not shard.holds(number):
                continue
            if done[row.sample_id] > 0:
                done[row.sample_id] -= 1
                continue
            waiting += self._prompts.maybe_samples(row, self.counts)
            if len(waiting) >= _WINDOW_BATCHES * self._writer.batch_size:
                yield from self._answer(waiting, data_epoch)
                waiting = []
        yield from self._answer(waiting, data_epoch)

    def _answer(self, prompts: list[Sample], data_epoch: int) -> Iterator[Sample]:
        prompts = sorted(prompts, key=len)
        for start in range(0, len(prompts), self._writer.batch_size):
            batch = prompts[start : start + self._writer.batch_size]
            answers = self._writer.answer(
                [self._request(prompt, data_epoch) for prompt in batch], self._stop
            )
            if answers is None:
                return
            for prompt, answer in zip(batch, answers, strict=True):
                if self._is_usable(prompt, answer):
                    yield _joined(prompt, answer)

    def _request(self, prompt: Sample, data_epoch: int) -> Request:
        limit = min(self._max_new_tokens, self._table.row_tokens - len(prompt))
        seed = answer_seed(self._seed, prompt.sample_id, data_epoch)
        return Request(prompt.token_ids.tolist(), seed, limit)

    def _is_usable(self, prompt: Sample, answer: Answer) -> bool:
        was_cut = answer.finish_reason == "length"
        reason = ""
        if was_cut and not self._table.keep_cut_answers:
            reason = "cut_answer"
        elif len(answer.token_ids) < _SHORTEST_ANSWER:
            reason = "empty_answer"
        if reason:
            self.counts.skipped.add(reason, f"sample {prompt.sample_id}")
        else:
            self.counts.num_cut_answers += was_cut
        return not reason

    def _make_again(self, recipe: Recipe) -> PackedRow | None:
        """Answer the prompts of a recorded row; None where a stop came first.

        The text is the same as far as the target's arithmetic is; what does not fit is left out.
        """
        prompts = self._prompts.read_all([(sample_id, 0) for sample_id in recipe.sample_ids])
        answered = {sample.sample_id: sample for sample in self._answer(prompts, recipe.data_epoch)}
        if self._stop.is_set():
            return None
        samples, room = [], self._table.row_tokens
        for sample_id in recipe.sample_ids:
            sample = answered.get(sample_id)
            if sample is not None and len(sample) <= room:
                samples.append(sample)
                room -= len(sample)
        # Prompts alone supervise nothing, but the row stays the one that others wait for.
        return make_row(
            samples or prompts, self._table.row_tokens, recipe.sequence, recipe.data_epoch
        )


def _joined(prompt: Sample, answer: Answer) -> Sample:
    token_ids = np.concatenate([prompt.token_ids, np.array(answer.token_ids, dtype=np.int32)])
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    loss_mask[len(prompt) :] = 1
    return Sample(prompt.sample_id, prompt.tag, token_ids, loss_mask)
