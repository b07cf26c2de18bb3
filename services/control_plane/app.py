"""The control plane's HTTP routes.

Reading is open to whoever reaches the port by a name of this control plane (`hosts`). Changing a run takes
`Authorization: Bearer <token>`, with the token that `<run_dir>/control.token` holds.
`/openapi.json` documents every route, with an answer for each of its status codes.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    StreamingResponse,
)
from prometheus_client import CONTENT_TYPE_LATEST

from services.control_plane.commands import command_routes
from services.control_plane.examples import (
    EVENT,
    METRICS,
    READY,
    UNREADY,
    example_history,
    example_status,
)
from services.control_plane.history import History, Recorder
from services.control_plane.hosts import KnownHosts
from services.control_plane.page import DIRECTORY, HEADERS, PageFiles
from services.control_plane.readings import Readings
from services.control_plane.registry import Registry
from services.control_plane.responses import (
    SLOW,
    TOO_SLOW,
    Responses,
    example,
    latest,
    problem,
)
from services.control_plane.status import SCHEMA_VERSION, Health, Readiness, Status

EVENT_INTERVAL_SECONDS = 0.5

_ABOUT = """State and control of one training run. Reading is open on loopback; a POST needs
`Authorization: Bearer <token>` with the token in `<run_dir>/control.token`. A `Host` that is neither a
number nor a name of this control plane is answered 400. `schema_version` of
/status rises when a field goes away or changes its meaning; fields may be added without."""


class EventStream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"


class DocumentedApp(FastAPI):
    """An application whose documentation keeps what is null in the examples of whole answers."""

    def openapi(self) -> dict[str, Any]:
        """Return the document; FastAPI leaves out what is null in it."""
        document = super().openapi()
        for path, whole in (("/status", example_status()), ("/history", example_history())):
            answer = document["paths"][path]["get"]["responses"]["200"]
            answer["content"]["application/json"]["example"] = whole
        return document


@dataclass(frozen=True)
class Sources:
    """What the routes read and change."""

    readings: Readings
    history: Recorder
    registry: Registry
    token: str
    hosts: frozenset[str]
    """Names that a request may give as its host."""
    stop: threading.Event
    """Ends the event streams, which would else keep the server from closing."""


def create_app(sources: Sources) -> FastAPI:
    """Return the application."""
    # The documentation pages load their scripts from another host, so they stay off.
    app = DocumentedApp(
        title="ringdraft control plane", version=str(SCHEMA_VERSION), description=_ABOUT,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.add_middleware(KnownHosts, names=sources.hosts)
    app.add_exception_handler(RequestValidationError, _explain_misfit)
    _add_health(app, sources)
    _add_views(app, sources)
    _add_history(app, sources)
    _add_events(app, sources)
    _add_page(app)
    app.include_router(command_routes(sources.registry, sources.history, sources.token))
    return app


def _add_health(app: FastAPI, sources: Sources) -> None:
    # On the event loop itself, so that slow readers of other routes cannot starve it.
    @app.get(
        "/healthz", tags=["health"], summary="Whether this process answers",
        responses=example(200, "It does.", {"status": "ok"}),
    )  # fmt: skip
    async def healthz() -> Health:
        """Depends on nothing else of the run."""
        return Health()

    @app.get(
        "/readyz", tags=["health"], summary="Whether the run trains",
        responses=example(200, "A target has a ring and a worker runs.", READY)
        | _unready(),
    )  # fmt: skip
    def readyz(response: Response) -> Readiness:
        """Names the reason where it does not."""
        reading = sources.readings.latest()
        reason = TOO_SLOW if reading is None else reading.status.not_ready_reason
        response.status_code = 503 if reason else 200
        return Readiness(is_ready=not reason, reason=reason)


def _unready() -> Responses:
    content = {"application/json": {"example": UNREADY}}
    return {503: {"description": "It does not, and why.", "model": Readiness, "content": content}}


def _add_views(app: FastAPI, sources: Sources) -> None:
    @app.get(
        "/status", tags=["views"], summary="All that is known of the run", response_model=Status,
        responses={200: {"description": "As of at most 0.2 s ago."}, **SLOW},
    )  # fmt: skip
    def read_status() -> Response:
        """Computed a few times a second at most, whoever asks; numbers of 64 bits are hexadecimal
        text, and what is not a number is null."""
        return Response(latest(sources.readings).status_json, media_type="application/json")

    @app.get(
        "/metrics", tags=["views"], summary="The same figures for Prometheus",
        response_class=PlainTextResponse,
        responses=example(200, "Prometheus text.", METRICS, "text/plain") | SLOW,
    )  # fmt: skip
    def metrics() -> Response:
        """Counters are the services' own, so they go on over a restart of the control plane."""
        return Response(latest(sources.readings).metrics, media_type=CONTENT_TYPE_LATEST)


def _add_history(app: FastAPI, sources: Sources) -> None:
    @app.get(
        "/history", tags=["views"], summary="Figures and events of the past", response_model=History,
        responses={
            200: {"description": "Everything later than `after`, oldest first."},
            **problem(422, "That is no time.", "query.after: Input should be a finite number"),
        },
    )  # fmt: skip
    def read_history(
        after: Annotated[
            float,
            Query(
                ge=0,
                allow_inf_nan=False,
                description="Seconds since 1970: the time of the last sample that is known.",
            ),
        ] = 0.0,
    ) -> Response:
        """Since this control plane started: the last minutes by the second, and what is older in
        steps that grow with the run, so that there is always its start."""
        past = sources.history.since(after)
        return Response(past.model_dump_json(), media_type="application/json")


def _add_events(app: FastAPI, sources: Sources) -> None:
    @app.get(
        "/events", tags=["views"], summary="/status as server-sent events, twice a second",
        response_class=EventStream,
        responses=example(200, "A stream without an end.", EVENT, "text/event-stream"),
    )  # fmt: skip
    async def events() -> StreamingResponse:
        """Each event carries the whole status, so a client that comes back has missed nothing."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return EventStream(_events(sources), headers=headers)


def _add_page(app: FastAPI) -> None:
    @app.get(
        "/", tags=["views"], summary="The page that people look at", response_class=HTMLResponse,
        responses=example(200, "HTML that loads nothing from elsewhere.", "<!doctype html>", "text/html"),
    )  # fmt: skip
    async def page() -> FileResponse:
        """Draws what /events and /history send; its files are under /static."""
        return FileResponse(DIRECTORY / "index.html", headers=HEADERS)

    app.mount("/static", PageFiles(), name="static")


async def _explain_misfit(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, RequestValidationError)
    texts = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()]
    return JSONResponse({"detail": "; ".join(texts)}, 422)


async def _events(sources: Sources) -> AsyncIterator[str]:
    """Yield the status as server-sent events; each carries all of it, so none needs replay."""
    number = 0
    while not sources.stop.is_set():
        reading = await asyncio.to_thread(sources.readings.latest)
        if reading is not None:
            number += 1
            yield f"id: {number}\nevent: status\ndata: {reading.status_json.decode()}\n\n"
        await asyncio.sleep(EVENT_INTERVAL_SECONDS)
