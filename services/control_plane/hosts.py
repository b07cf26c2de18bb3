"""Answers only requests that name this control plane as their host.

Reading takes no token, so a page in a browser must not read: its own name, pointed at loopback for a
moment (DNS rebinding), would make this server the page's own. A browser sends that name as `Host`.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from common.config.shared import ControlPlaneTable

_LOOPBACK = "localhost"


class KnownHosts:
    """An ASGI application that passes on what names a known host, and refuses the rest with 400.

    A number is always known, since no page has one for its name that is not its server's own. A request
    without `Host` is HTTP/1.0, which browsers do not send.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or explain."""
        if scope["type"] == "http":
            given = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
            unknown = next((text for text in given if not self._is_known(text)), None)
            if unknown is not None:
                await JSONResponse({"detail": _explain(unknown)}, 400)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, text: str) -> bool:
        name = host_of(text)
        return name in self._names or name.endswith(f".{_LOOPBACK}") or _is_number(name)


def names_of(table: ControlPlaneTable) -> frozenset[str]:
    """Return the names of a control plane: loopback's, this machine's, the bound one's, and more."""
    names = (_LOOPBACK, socket.gethostname(), table.host, *table.allowed_hosts)
    return frozenset(name.lower() for name in names)


def host_of(text: str) -> str:
    """Return the host of a `Host` header in small letters; empty where it is none."""
    try:
        return (urlsplit(f"//{text}").hostname or "").removesuffix(".")
    except ValueError:  # brackets without an address
        return ""


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _explain(given: str) -> str:
    return (
        f"Host: got {given!r}, expected a number or a name of this control plane, so that no web page reads "
        f"it; ask for http://127.0.0.1:<port>, or add the name to control_plane.allowed_hosts"
    )
