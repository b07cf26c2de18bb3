"""What the routes' documentation says of their answers: status codes, content, examples."""

from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict

from services.control_plane.readings import Reading, Readings

Responses = dict[int | str, dict[str, Any]]

TOO_SLOW = "the state could not be read within a second; ask again"
NO_TOKEN = "missing or wrong bearer token; send the one in <run_dir>/control.token"


class Problem(BaseModel):
    """Why a request was refused, and what to do."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    detail: str
    """What was asked, what is there, what to do."""


def example(code: int, text: str, body: Any, media_type: str = "application/json") -> Responses:
    """Document one answer."""
    return {code: {"description": text, "content": {media_type: {"example": body}}}}


def problem(code: int, text: str, detail: str) -> Responses:
    """Document one refusal."""
    # In place, since FastAPI would document a model under the media type of the route's answer.
    answer = {"schema": Problem.model_json_schema(), "example": {"detail": detail}}
    return {code: {"description": text, "content": {"application/json": answer}}}


SLOW: Responses = problem(503, "The machine is overloaded.", TOO_SLOW)
UNAUTHORIZED: Responses = problem(401, "The token is missing or wrong; nothing was done.", NO_TOKEN)


def latest(readings: Readings) -> Reading:
    """Return the state, or answer 503."""
    reading = readings.latest()
    if reading is None:
        raise HTTPException(503, TOO_SLOW)
    return reading
