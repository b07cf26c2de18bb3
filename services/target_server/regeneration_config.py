"""The [regeneration] table: which prompts to answer, where to, and who answers."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from common.config.loading import Table
from common.config.shared import RunTable, TargetTable
from services.target_server.generation_config import GenerationTable


def _plain_address(server: str) -> str:
    if not server:
        return server
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"got {server!r}, expected an address such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError(
            "got an address with a user or a password in it, which would be written to logs; put "
            "the key into the environment variable that api_key_variable names"
        )
    return server.rstrip("/")


class RegenerationTable(Table):
    """[regeneration]: prompts to answer and how."""

    prompts: Path
    """Prompts: a file or folder of rows as a data source has them, with answers or without."""
    output: Path
    """JSONL file to which the answered conversations are appended."""
    keep_finish_reasons: tuple[str, ...] = ("stop", "length", "tool_calls")
    """Conversations whose last answer ended otherwise go to a file beside it, `<output>.left_out`."""
    server: Annotated[str, AfterValidator(_plain_address)] = ""
    """Address of an OpenAI-compatible server; empty: this process runs the target itself."""
    server_model: str = ""
    """The model's name at the server; empty: the one that the server has."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key; where it is unset none is sent."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Requests under way at the server at a time."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long the server may take for one answer."""
    max_attempts: int = Field(default=8, ge=1)
    """Tries of one answer; those for overload, server faults and lost connections are repeated."""
    backoff_seconds: float = Field(default=0.5, gt=0)
    """Longest pause before the second try; doubles with each, up to a minute."""
    request: dict[str, Any] = {}
    """Further keys of each request's body, such as min_p."""


class RegenerateConfig(Table):
    """What `python -m services.target_server.regenerate` reads."""

    run: RunTable = RunTable()
    target: TargetTable | None = None
    generation: GenerationTable = GenerationTable()
    regeneration: RegenerationTable

    @model_validator(mode="after")
    def _someone_answers(self) -> "RegenerateConfig":
        if self.target is None and not self.regeneration.server:
            raise ValueError(
                "nobody to answer: set target.model, whose weights this process loads, or "
                "regeneration.server, the address of a server"
            )
        return self
