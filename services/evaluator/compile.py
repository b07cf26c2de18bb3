"""The evaluator's one door to torch.compile. Main thread only."""

from collections.abc import Callable
from typing import Any

import torch


def compile_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of fixed shapes and replay it as CUDA graphs.

    What it returns lives until it is called again. What it writes must have a fixed address.
    """
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)

    def run(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return run


def forget_compiled() -> None:
    """Drop all compiled code: it does not see that the hooks of a model have changed."""
    torch.compiler.reset()
