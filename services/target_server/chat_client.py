"""Asks an OpenAI-compatible server for chat completions, and asks again where that can help.

Overload (429), server faults (5xx), timeouts, lost connections and bodies that are no answer are
tried again after a pause that doubles, with jitter. A Retry-After holds every request back, for
the server means all of them, but no longer than the longest pause. The server's key is in no text
that is logged or raised, whatever the server says. What no repetition can mend is an error at once: 401, 403 and 404
end the run, another refusal costs one conversation.
"""

import asyncio
import email.utils
import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from common.config.secrets import read_secret
from common.errors import AnswerError, ConfigError, RowRejectedError
from services.target_server.dialogues import Dialogue, Reply
from services.target_server.generation_config import GenerationTable
from services.target_server.regeneration_config import RegenerationTable
from services.target_server.replies import read_reply

_LONGEST_PAUSE_SECONDS = 60.0
_SILENT_PAUSE_SECONDS = 5.0
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
        key = _key_of(table)
        self._key_forms = _forms_of(key)
        self._http = httpx.AsyncClient(
            base_url=_base_url(table.server),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(table.timeout_seconds, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=table.concurrency),
        )
        self._jitter = random.Random()
        self._opens_at = 0.0
        self._told: set[str] = set()
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
                f"({self._shown(', '.join(names[:5]))}); name one by regeneration.server_model"
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
                await asyncio.sleep(self._pause(attempt, problem))
            while (wait := self._opens_at - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            try:
                async with asyncio.timeout(self._table.timeout_seconds):
                    response = await self._http.request(method, path, json=body)
            except (httpx.RequestError, TimeoutError) as error:
                rejected = None
                problem = f"{type(error).__name__}: {self._shown(str(error))}"
                continue
            if response.is_success:
                payload = _payload_in(response, "choices" if body else "data")
                if payload is not None:
                    try:
                        return read(payload)
                    except RowRejectedError as error:
                        rejected = self._without_key(error, response)
                        problem = str(rejected)
                        continue
                rejected = None
                problem = f"a body that is no answer: {self._shown(response.text)!r}"
                continue
            rejected = None
            problem = f"status {response.status_code}: {self._shown(response.text)!r}"
            if response.status_code < 500 and response.status_code not in _RETRIED:
                raise self._refusal(response, problem)
            self._hold_back(response, problem)
        if rejected:
            raise rejected
        raise AnswerError(
            f"{self._table.server!r}: no answer in {self._table.max_attempts} attempts; the last "
            f"one got {problem}"
        )

    def _pause(self, attempt: int, problem: str) -> float:
        longest = min(self._table.backoff_seconds * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
        seconds = longest * self._jitter.uniform(0.5, 1.0)
        self._tell_of_pause(seconds, problem)
        return seconds

    def _hold_back(self, response: httpx.Response, problem: str) -> None:
        asked = _retry_after(response.headers.get("retry-after", ""))
        seconds = min(asked, _LONGEST_PAUSE_SECONDS)
        if seconds > 0:
            self._opens_at = max(self._opens_at, time.monotonic() + seconds)
            self._tell_of_pause(seconds, f"{problem}, Retry-After {asked:.0f} s")

    def _tell_of_pause(self, seconds: float, problem: str) -> None:
        """Log a long pause, once a kind of problem."""
        kind = problem.partition(":")[0]
        if seconds >= _SILENT_PAUSE_SECONDS and kind not in self._told:
            self._told.add(kind)
            _log.warning(
                "%s: waiting %.0f s before the next try, and as long again where this goes on; it "
                "answered with %s", self._table.server, seconds, problem,
            )  # fmt: skip

    def _shown(self, text: str) -> str:
        """Return the beginning of what a server said, without the key."""
        for form in self._key_forms:
            text = text.replace(form, "***")
        return text[:200]

    def _without_key(self, error: RowRejectedError, response: httpx.Response) -> RowRejectedError:
        # What the error quotes may be cut within the key.
        if any(form in response.text for form in self._key_forms):
            return RowRejectedError(error.reason, "not shown, for the server's key is in it")
        return error

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
                f"{self._shown(response.headers.get('location', ''))!r}; give that address itself"
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


def _key_of(table: RegenerationTable) -> str:
    """Return the server's key, or raise `ConfigError` for one that no header can hold."""
    key = read_secret(table.api_key_variable)
    if not (key.isascii() and (key.isprintable() or not key)):
        raise ConfigError(
            f"the key in the environment variable {table.api_key_variable} has line breaks or "
            f"characters outside ASCII, expected what a header can hold; set it again"
        )
    return key


def _forms_of(key: str) -> tuple[str, ...]:
    """Return a key as it may stand in a text, in JSON or in an address; nothing without a key."""
    in_json = json.dumps(key)[1:-1]
    forms = {key, in_json, in_json.replace("/", "\\/"), quote(key), quote(key, safe="")} - {""}
    return tuple(sorted(forms, key=len, reverse=True))


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
