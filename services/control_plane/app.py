"""The control plane's HTTP routes.

Reading is open: the server binds loopback unless a token exists. Changing a run takes
`Authorization: Bearer <token>`, with the token that `<run_dir>/control.token` holds.
"""

import asyncio
import hmac
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, HTTPException, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from services.control_plane.metrics import render
from services.control_plane.page import PAGE
from services.control_plane.registry import Registry
from services.control_plane.status import CommandAccepted, Health, Readiness, Status

EVENT_INTERVAL_SECONDS = 0.5

CommandName = Literal["pause", "resume", "drain", "stop", "checkpoint"]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


@dataclass(frozen=True)
class Sources:
    """What the routes read and change."""

    read_status: Callable[[], Status]
    registry: Registry
    token: str
    stop: threading.Event
    """Ends the event streams, which would else keep the server from closing."""


def create_app(sources: Sources) -> FastAPI:
    """Return the application."""
    # The documentation pages load their scripts from another host, so they stay off.
    app = FastAPI(title="ringdraft control plane", docs_url=None, redoc_url=None)
    _add_health(app, sources)
    _add_views(app, sources)
    _add_commands(app, sources)
    return app


def _add_health(app: FastAPI, sources: Sources) -> None:
    # On the event loop itself, so that slow readers of other routes cannot starve it.
    @app.get("/healthz")
    async def healthz() -> Health:
        return Health()

    @app.get("/readyz", responses={503: {"model": Readiness}})
    def readyz(response: Response) -> Readiness:
        status = sources.read_status()
        response.status_code = 200 if status.is_ready else 503
        return Readiness(is_ready=status.is_ready, reason=status.not_ready_reason)


def _add_views(app: FastAPI, sources: Sources) -> None:
    @app.get("/status")
    def read_status() -> Status:
        return sources.read_status()

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(render(sources.read_status()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/events")
    async def events() -> StreamingResponse:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(_events(sources), media_type="text/event-stream", headers=headers)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)


def _add_commands(app: FastAPI, sources: Sources) -> None:
    @app.post("/runs/{name}", status_code=202)
    def command(name: CommandName, credentials: Credentials) -> CommandAccepted:
        _check_token(credentials, sources.token)
        given, num_recipients = sources.registry.command(name)
        return CommandAccepted(name=name, number=given.number, num_recipients=num_recipients)


def _check_token(credentials: HTTPAuthorizationCredentials | None, token: str) -> None:
    given = credentials.credentials if credentials is not None else ""
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(
            status_code=401,
            detail="missing or wrong bearer token; send the one in <run_dir>/control.token",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def _events(sources: Sources) -> AsyncIterator[str]:
    """Yield the status as server-sent events; each carries all of it, so none needs replay."""
    number = 0
    while not sources.stop.is_set():
        status = await asyncio.to_thread(sources.read_status)
        number += 1
        yield f"id: {number}\nevent: status\ndata: {status.model_dump_json()}\n\n"
        await asyncio.sleep(EVENT_INTERVAL_SECONDS)
