"""Variables that libraries read for themselves, such as where a compiler keeps its cache."""

import os
from collections.abc import Mapping


def set_where_unset(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children; what the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def read_visible_gpus() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, which says what this process may use; None where it is unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def show_only_gpu(uuid: str) -> None:
    """Have CUDA show one GPU to this process and its children; works until CUDA is initialised."""
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
