"""Tables that a group has of its own: `[groups.<name>.drafter]` lies over `[drafter]`, key by key.

Only who works in the group, by `training.group`, reads them.
"""

from collections.abc import Sequence
from typing import Any

OWN_TABLES = ("drafter", "optimizer", "training")
"""What groups of one stream may have differently: nothing that rows depend on."""


class Origins:
    """Where keys were written, for messages about them."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._keys: set[tuple[str, str]] = set()

    def add(self, table: str, key: str) -> None:
        """Note that a table's key is the group's own."""
        self._keys.add((table, key))

    def name(self, location: Sequence[str]) -> str:
        """Return a key as its writer knows it."""
        key = ".".join(location)
        if tuple(location[:2]) in self._keys:
            return f"groups.{self._group}.{key}"
        if len(location) == 1 and any(table == key for table, _ in self._keys):
            return f"{key} with groups.{self._group}.{key}"
        return key


def lay_over(values: dict[str, Any]) -> Origins:
    """Lay a group's tables over the run's in place. What is no table is left for its refusal."""
    group = _table(values, "training").get("group", "main")
    origins = Origins(str(group))
    own = _table(_table(values, "groups"), group)
    for name in OWN_TABLES:
        for key, value in _table(own, name).items():
            if isinstance(values.setdefault(name, {}), dict):
                values[name][key] = value
                origins.add(name, key)
    return origins


def _table(values: dict[str, Any], name: Any) -> dict[str, Any]:
    found = values.get(name) if isinstance(name, str) else None
    return found if isinstance(found, dict) else {}
