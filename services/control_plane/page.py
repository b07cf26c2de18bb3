"""The page at `/`: files of the package, sent with headers that keep it from loading anything else.

index.html   main.js --> link.js (/events)  --> figures.js, tables.js
                     --> history.js (/history) --> charts.js, events
                     --> commands.js (POST)

`static/vendor/` has the chart library as its authors publish it, with its licence.
"""

from pathlib import Path

from fastapi import Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

DIRECTORY = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for again each time, and unchanged mostly: no file of an earlier version stays in use.
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    """The page's files, with the headers."""

    def __init__(self) -> None:
        super().__init__(directory=DIRECTORY)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Answer with a file, or 404."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
