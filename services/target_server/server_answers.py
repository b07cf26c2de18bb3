"""Has a server answer dialogues, a fixed number of them at a time."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator

from common.errors import AnswerError, ConfigError, RowRejectedError
from services.target_server.chat_client import ChatClient
from services.target_server.dialogues import Dialogue, Sink
from services.target_server.regeneration_config import RegenerateConfig
from services.target_server.seeds import answer_seed

_STOP_CHECK_SECONDS = 0.1
_log = logging.getLogger(__name__)


def answer_by_server(
    config: RegenerateConfig, sink: Sink, waiting: Iterator[Dialogue], stop: threading.Event
) -> None:
    """Answer dialogues until none is left or a stop is asked for.

    Raises:
        ConfigError: the server refuses this client, or every conversation.
        AnswerError: the server has ceased to answer.
    """
    asyncio.run(_until_stopped(_ServerRun(config, sink, waiting), stop))


async def _until_stopped(run: "_ServerRun", stop: threading.Event) -> None:
    work = asyncio.ensure_future(run.answer_all())
    while not work.done() and not stop.is_set():
        await asyncio.wait((work,), timeout=_STOP_CHECK_SECONDS)
    if not work.done():
        work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


class _ServerRun:
    """The dialogues of one run, and how the server has treated the last of them."""

    def __init__(self, config: RegenerateConfig, sink: Sink, waiting: Iterator[Dialogue]) -> None:
        self._config = config
        self._concurrency = config.regeneration.concurrency
        self._sink = sink
        self._waiting = waiting
        self._failed_in_a_row = 0
        self._refused_in_a_row = 0

    async def answer_all(self) -> None:
        config = self._config
        kwargs = config.target.chat_template_kwargs if config.target else {}
        async with ChatClient(config.regeneration, config.generation, kwargs) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._concurrency):
                        group.create_task(self._work(client))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                if client.num_retries:
                    _log.info("%d requests were tried again", client.num_retries)

    async def _work(self, client: ChatClient) -> None:
        for dialogue in self._waiting:
            try:
                while not dialogue.is_done:
                    seed = answer_seed(self._config.run.seed, dialogue.id, dialogue.turn)
                    dialogue.take(await client.reply(dialogue, seed % (1 << 31)))
            except RowRejectedError as error:
                self._sink.skip(error, dialogue.id)
                self._count_refused(error)
            except AnswerError as error:
                self._sink.fail(dialogue.id)
                _log.warning("prompt %r: %s", dialogue.id, error)
                self._count_failed(error)
            else:
                self._sink.add(dialogue)
                self._failed_in_a_row = self._refused_in_a_row = 0

    def _count_failed(self, error: AnswerError) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._concurrency:
            raise AnswerError(
                f"the server has answered none of the last {self._failed_in_a_row} prompts; start "
                f"again when it is back. The last one: {error}"
            )

    def _count_refused(self, error: RowRejectedError) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= max(self._concurrency, 8):
            raise ConfigError(
                f"the server has refused the last {self._refused_in_a_row} prompts, or answered "
                f"them with what is no answer; check [generation] and regeneration.request. The last one: {error}"
            )
