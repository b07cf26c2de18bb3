"""Figures of a status as people read them; what is not known is a dash."""

from typing import Any


def number(value: float | None, digits: int) -> str:
    """Return a number with so many digits behind the point."""
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """Return a share of the time."""
    return "-" if value is None else f"{value:.0%}"


def counts(values: dict[str, int]) -> str:
    """Return counts by what they are of."""
    return ", ".join(f"{name} {count}" for name, count in values.items())


def absence(group: dict[str, Any]) -> str:
    """Say how long a group has been without a worker, and what that does."""
    state = "detached" if group["is_detached"] else f"{group['num_waiting']} rows wait"
    return f"{group['group']} ({state}, {group['absent_seconds']:.0f} s)"


def holders(place: dict[str, Any]) -> str:
    """Say who has a GPU."""
    names = [holder["instance"] for holder in place["holders"]]
    return ", ".join(names) or ("kept for targets" if place["is_reserved"] else "-")
