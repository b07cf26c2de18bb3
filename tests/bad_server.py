"""An OpenAI-compatible server that misbehaves on purpose, as a process of its own.

`python -m tests.bad_server PORT_FILE LOG_FILE [FAULT ...]` binds a free port, writes it to
PORT_FILE and logs a JSON line a request. Each conversation state meets each named fault once, in
order, before it is answered (a fault that begins with "{" is a body of status 200); what it is answered is a function of its messages alone.
"""

import asyncio
import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

KEY = "secret-key"
_DELAYS = {"slow": 0.15, "hang": 3.0}
_BODIES = {
    "reset": "",
    "malformed": '{"choices": [',
    "no_choices": '{"error": {"message": "tired"}}',
}
_WAITS = {"wait_429": "1", "day_429": "86400"}
_TRANSPORTS: dict[tuple[str, int], Any] = {}


class Tracked(H11Protocol):
    """Remembers connections, so that a fault can reset one."""

    def connection_made(self, transport: Any) -> None:
        _TRANSPORTS[transport.get_extra_info("peername")] = transport
        super().connection_made(transport)


def answer_to(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the message and finish reason that a conversation gets."""
    question = messages[-1]["content"]
    own = [m["content"] for m in messages if m["role"] == "assistant"]
    text = f"answer {len(own)} to {question}, after {own[-1:]}"
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if "think" in question:
        message["reasoning_content"] = f"thought of {question}"
    if "reason" in question:
        message["reasoning"] = f"reasoned on {question}"
    reasons = [r for r in ("length", "content_filter", "tool_calls") if r in question]
    if reasons == ["tool_calls"]:
        call = {"name": "look", "arguments": "{}"}
        message |= {"content": None, "tool_calls": [{"id": "1", "function": call}]}
    return message, reasons[0] if reasons else "stop"


async def misbehave(fault: str, request: Request) -> Response | None:
    """Commit one fault; None goes on to the answer."""
    if fault in _DELAYS:
        await asyncio.sleep(_DELAYS[fault])
        return None
    if fault == "reset":
        _reset(request)
    if fault == "truncated":
        return StreamingResponse(_half(), headers={"content-length": "1000"})
    if fault.startswith("{"):
        return Response(fault, media_type="application/json")
    if fault.startswith("echo"):
        key = request.headers.get("authorization", "")
        return JSONResponse({"error": "x" * 160 + f" no such key: {key}"}, int(fault[-3:]))
    if fault in _BODIES:
        return Response(_BODIES[fault], media_type="application/json")
    headers = {"retry-after": _WAITS[fault]} if fault in _WAITS else {}
    return JSONResponse({"error": f"fault {fault}"}, int(fault[-3:]), headers=headers or None)


def _reset(request: Request) -> None:
    transport = _TRANSPORTS[tuple(request.scope["client"])]
    linger = struct.pack("ii", 1, 0)  # a close at once, which the peer sees as a reset
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


async def _half() -> AsyncIterator[bytes]:
    yield b'{"choices": [{"message": '
    raise ConnectionAbortedError


def make_app(faults: list[str], log: Path) -> FastAPI:
    """Return the server; its state is in this closure's counters."""
    app, seen = FastAPI(), Counter[str]()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": "the-model"}]}

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        asked = json.dumps(body["messages"])
        fault = dict(enumerate(faults)).get(seen[asked], "")
        seen[asked] += 1
        entry = {"at": time.monotonic(), "fault": fault, "body": body,
                 "key": request.headers.get("authorization", "")}  # fmt: skip
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        response = await misbehave(fault, request) if fault else None
        if response is not None:
            return response
        message, reason = answer_to(body["messages"])
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"choices": [choice], "usage": {"completion_tokens": 5}}

    return app


@contextmanager
def serving(folder: Path, *faults: str) -> Iterator[str]:
    """Run the server as a process and yield its address; its log is `folder / server.jsonl`."""
    from tests.runs import start  # loads torch, which the server itself does not need

    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    process = start("tests.bad_server", port_file, folder / "server.jsonl", *faults,
                    log=folder / "server.log")  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        process.kill()
        process.wait()


def requests_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the server was asked, in order."""
    path = folder / "server.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    """Serve until killed."""
    port_file, log, *faults = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", 0))
    temporary = Path(f"{port_file}.tmp")
    temporary.write_text(str(listener.getsockname()[1]))
    temporary.replace(port_file)
    config = uvicorn.Config(make_app(faults, Path(log)), http=Tracked, log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
