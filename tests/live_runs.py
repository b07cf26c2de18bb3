"""A run under `ringdraft up`, through its control plane, for tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.control_planes import client
from tests.rings import wait_until

PATIENCE_SECONDS = 150.0


class Live:
    """A run that may not have begun to serve."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._http = client(timeout=30)

    @property
    def url(self) -> str:
        return json.loads((self.run / "control.json").read_text())["url"]

    @property
    def token(self) -> str:
        return (self.run / "control.token").read_text().strip()

    def status(self) -> dict[str, Any] | None:
        """Return what /status says, or None where nobody answers."""
        try:
            return self._http.get(f"{self.url}/status").raise_for_status().json()
        except (OSError, ValueError, httpx.HTTPError):
            return None

    def post(self, path: str) -> None:
        headers = {"authorization": f"Bearer {self.token}"}
        assert self._http.post(f"{self.url}{path}", headers=headers).status_code == 202

    def wait(self, holds: Callable[[dict[str, Any]], Any], what: str) -> None:
        def is_so() -> bool:
            status = self.status()
            return status is not None and bool(holds(status))

        wait_until(is_so, what, PATIENCE_SECONDS)

    def close(self) -> None:
        self._http.close()
