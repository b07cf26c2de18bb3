"""Asks an OpenAI-compatible server for chat completions, and asks again where that can help.

Overload (429), server faults (5xx), timeouts, lost connections and bodies that are no answer are
tried again after a pause that doubles, with jitter. A Retry-After holds every request back, for
the server means all of them. What no repetition can mend is an error at once: 401, 403 and 404
end the run, another refusal costs one conversation.
"""

import asyncio
import email.utils
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx

from common.config.secrets import read_secret
from common.errors import AnswerError, ConfigError, RowRejectedError
from services.target_server.dialogues import Dialogue, Reply
from services.target_server.generation_config import GenerationTable
from services.target_server.regeneration_config import RegenerationTable
from services.target_server.replies import read_reply

_LONGEST_PAUSE_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_RETRIED = (408, 409, 425, 429)
_Read = TypeVar("_Read")
_log = logging.getLogger(__name__)


class ChatClient:
    """One server and model. An async context manager; its requests may run side by side."""

    def __init__(
        self,
        table: RegenerationTable,
        generation: GenerationTable,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._table = table
        self._body = _fixed_body(table, generation, template_kwargs)
        key = read_secret(table.api_key_variable)
        self._http = httpx.AsyncClient(
            base_url=_base_url(table.server),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(table.timeout_seconds, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=table.concurrency),
        )
        self._jitter = random.Random()
        self._opens_at = 0.0
        self.num_retries = 0

    async def __aenter__(self) -> "ChatClient":
        if "model" not in self._body:
            self._body["model"] = await self._only_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def reply(self, dialogue: Dialogue, seed: int) -> Reply:
        """Return the next turn.

        Raises:
            RowRejectedError: the server refuses this conversation, or its last answer is none.
            AnswerError: every attempt failed.
            ConfigError: the server refuses this client, or has no such model.
        """
        body = self._body | {"messages": dialogue.messages}
        if dialogue.tools:
            body["tools"] = dialogue.tools
        if body["temperature"] > 0:
            body["seed"] = seed
        return await self._request("POST", "chat/completions", body, read_reply)

    async def _only_model(self) -> str:
        names = await self._request("GET", "models", None, _model_names)
        if len(names) != 1:
            raise ConfigError(
                f"regeneration.server={self._table.server!r} has {len(names)} models "
                f"({', '.join(names[:5])}); name one by regeneration.server_model"
            )
        return names[0]

    async def _request(
        self, method: str, path: str, body: Any, read: Callable[[dict[str, Any]], _Read]
    ) -> _Read:
        problem = ""
        rejected: RowRejectedError | None = None
        for attempt in range(self._table.max_attempts):
            if attempt:
                self.num_retries += 1
                await asyncio.sleep(self._pause(attempt))
            while (wait := self._opens_at - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            try:
                async with asyncio.timeout(self._table.timeout_seconds):
                    response = await self._http.request(method, path, json=body)
            except (httpx.TransportError, TimeoutError) as error:
                rejected = None
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                payload = _payload_in(response, "choices" if body else "data")
                if payload is not None:
                    try:
                        return read(payload)
                    except RowRejectedError as error:
                        rejected = error
                        continue
                rejected = None
                problem = f"a body that is no answer: {response.text[:200]!r}"
                continue
            rejected = None
            problem = f"status {response.status_code}: {response.text[:200]!r}"
            if response.status_code < 500 and response.status_code not in _RETRIED:
                raise self._refusal(response, problem)
            self._hold_back(response)
        if rejected:
            raise rejected
        raise AnswerError(
            f"{self._table.server!r}: no answer in {self._table.max_attempts} attempts; the last "
            f"one got {problem}"
        )

    def _pause(self, attempt: int) -> float:
        longest = min(self._table.backoff_seconds * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
        return longest * self._jitter.uniform(0.5, 1.0)

    def _hold_back(self, response: httpx.Response) -> None:
        seconds = _retry_after(response.headers.get("retry-after", ""))
        if seconds > 0:
            self._opens_at = max(self._opens_at, time.monotonic() + seconds)
            _log.debug("%s asks for a pause of %.1f s", self._table.server, seconds)

    def _refusal(self, response: httpx.Response, problem: str) -> Exception:
        table = self._table
        if response.status_code in (401, 403):
            return ConfigError(
                f"regeneration.server={table.server!r} refuses this client, {problem}; put its key "
                f"into the environment variable {table.api_key_variable}, or name another one by "
                f"regeneration.api_key_variable"
            )
        if response.status_code == 404:
            return ConfigError(
                f"regeneration.server={table.server!r} has no {str(response.request.url)!r} or no "
                f"model {self._body.get('model', '')!r}, {problem}; check the address and "
                f"regeneration.server_model"
            )
        if response.is_redirect:
            return ConfigError(
                f"regeneration.server={table.server!r} redirects to "
                f"{response.headers.get('location', '')!r}; give that address itself"
            )
        return RowRejectedError(f"refused_{response.status_code}", problem)


def _fixed_body(
    table: RegenerationTable, generation: GenerationTable, template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what every request says. Extensions of the protocol are sent only where they are set."""
    body: dict[str, Any] = {
        "max_tokens": generation.max_new_tokens, "temperature": generation.temperature
    }  # fmt: skip
    if generation.top_p < 1:
        body["top_p"] = generation.top_p
    if generation.top_k:
        body["top_k"] = generation.top_k
    if template_kwargs:
        body["chat_template_kwargs"] = dict(template_kwargs)
    if table.server_model:
        body["model"] = table.server_model
    return body | table.request


def _base_url(server: str) -> str:
    """Return where the API lies: under /v1, unless the address has a path of its own."""
    return server if httpx.URL(server).path.strip("/") else f"{server}/v1"


def _payload_in(response: httpx.Response, key: str) -> dict[str, Any] | None:
    """Return a body that has what was asked for, or None."""
    try:
        payload = response.json()
        entries = payload[key]
        if key == "choices":
            entries[0]["message"].get("content")
        elif not all(isinstance(entry["id"], str) for entry in entries):
            return None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return payload


def _model_names(payload: dict[str, Any]) -> list[str]:
    return [model["id"] for model in payload["data"]]


def _retry_after(text: str) -> float:
    """Return the seconds of a Retry-After header, which has seconds or a date; 0 for neither."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
