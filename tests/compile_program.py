"""A worker as far as compiling goes: cache, turn, first steps; prints one JSON line.

    python -m tests.compile_program CACHE cpu|cuda HOLDER

On a GPU it trains a tiny drafter in compiled, captured steps. On a CPU, where a drafter takes minutes
to compile, it is a norm, a product and the project's loss op, in the same way.
"""

import json
import sys
import threading
from functools import partial
from pathlib import Path

from common.lifecycle import process_age_seconds
from services.drafter_worker.compile_cache import CompileTurn, open_cache

NUM_STEPS = 3


def main() -> None:
    """Compile in turn, then step."""
    place, device, holder = sys.argv[1:]
    folder = open_cache(Path(place))
    import torch

    from services.drafter_worker.compile import cache_counts

    torch.set_num_threads(1)
    turn = CompileTurn(folder, f"tiny-{device}", holder)
    say = partial(print, file=sys.stderr)
    losses = turn.take(first_steps if device == "cuda" else small_steps, threading.Event(), say)
    print(
        json.dumps(
            {
                "seconds_to_first_step": process_age_seconds(),
                "compile_seconds": turn.compile_seconds,
                "waited_seconds": turn.waited_seconds,
                "losses": losses,
                **cache_counts()._asdict(),
            }
        )
    )


def first_steps() -> list[float]:
    """Return the losses of a tiny drafter's first steps on the GPU."""
    import torch

    from tests.gpu.test_step_on_gpu import make_stepper, spec_for, train

    spec = spec_for("sliding")
    stepper = make_stepper(spec, torch.bfloat16, "blocks", fast=True)
    return train(stepper, spec, torch.bfloat16, NUM_STEPS)


def small_steps() -> list[float]:
    """Return the losses of a few steps of gradient descent on one matrix."""
    import torch

    from common.drafters.dflash.loss import head_loss
    from common.drafters.dflash.model import RMSNorm
    from services.drafter_worker.compile import compile_whole, refuse_recompiles

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 8, generator=generator, requires_grad=True)
    x, head = (torch.randn(size, 8, generator=generator) for size in (4, 11))
    labels, is_used = torch.arange(4), torch.ones(4, dtype=torch.bool)
    norm = RMSNorm(8, 1e-6)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        hidden = norm(rows @ matrix)
        arguments = (hidden, head, labels, is_used, None, None, "cross_entropy", 4, 4, [], 0.0)
        return head_loss(*arguments)[0].sum()

    step, losses = compile_whole(loss_of), []
    for _ in range(NUM_STEPS):
        matrix.grad = None
        loss = step(x)
        loss.backward()
        with torch.no_grad():
            matrix -= 0.1 * matrix.grad
        refuse_recompiles()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
