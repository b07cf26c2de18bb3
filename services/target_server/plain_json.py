"""What JSON in UTF-8 can hold, which Python's own values go beyond: NaN, dates, bytes, half a
surrogate pair. Such a value ends a request or a write; these checks refuse its row before.
"""

import json
from typing import Any

from common.errors import RowRejectedError


def check_text(value: Any) -> None:
    """Refuse half a surrogate pair in any text of a value, as `bad_utf8`."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowRejectedError("bad_utf8", f"half a surrogate pair: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RowRejectedError("not_json", str(error)) from error


def check_json(reason: str, value: Any) -> None:
    """Refuse a value that has no JSON as `reason`, and half a surrogate pair as `bad_utf8`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RowRejectedError("bad_utf8", f"half a surrogate pair: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RowRejectedError(reason, f"it has no JSON: {error}") from error


def is_json(value: Any) -> bool:
    """Say whether `check_json` lets a value pass."""
    try:
        check_json("", value)
    except RowRejectedError:
        return False
    return True
