"""Variables that libraries read for themselves, such as where a compiler keeps its cache."""

import os
from collections.abc import Mapping


def set_where_unset(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children; what the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
