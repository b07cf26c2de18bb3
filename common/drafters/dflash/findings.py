"""What a lint says: a key of a checkpoint, what it holds, what it should, and who misreads it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

RINGDRAFT = "ringdraft"
SGLANG = "SGLang"
SPECFORGE = "SpecForge"
SPECULATORS = "speculators"
TRANSFORMERS = "transformers"
VLLM = "vLLM"
ZLAB = "z-lab"


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()
"""What a key holds that is not there; a null is None."""


@dataclass(frozen=True)
class Finding:
    """One key that some reader takes for something else than what was trained."""

    key: str
    got: Any
    expected: str
    readers: tuple[str, ...]
    harm: str
    """What these readers do with it."""

    def __str__(self) -> str:
        return (
            f"{self.key}: got {self.got!r}, expected {self.expected}; "
            f"{', '.join(self.readers)}: {self.harm}"
        )


def at(config: Mapping[str, Any], key: str) -> Any:
    """Return a key's value, or NOTHING."""
    return config.get(key, NOTHING)


def table_at(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table under a key; an empty one where there is none."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def ours(got: Any) -> tuple[str, ...]:
    """Name this project as one that a wrong value misleads; it stops by itself where there is none."""
    return () if got is NOTHING else (RINGDRAFT,)


def is_count(value: Any, minimum: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_ids(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list, not empty, of whole numbers from 0."""
    return isinstance(value, list) and bool(value) and all(is_count(item, 0) for item in value)
