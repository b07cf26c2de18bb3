"""A worker that takes its turn to compile, as far as others see it; here compiling is waiting.

    python -m tests.turn_program FOLDER KEY HOLDER SECONDS [PATIENCE]

Prints `compiling`, then `done`; or `stopped`. Negative SECONDS: compiling fails after as many.
"""

import logging
import sys
import threading
from pathlib import Path

from common.lifecycle import run_service
from services.drafter_worker.compile_cache import PATIENCE_SECONDS, CompileTurn


def main(stop: threading.Event) -> None:
    """Take one turn."""
    folder, key, holder, seconds, *patience = sys.argv[1:]
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(levelname)s %(message)s")

    def compile_it() -> str:
        print("compiling", flush=True)
        threading.Event().wait(abs(float(seconds)))
        if float(seconds) < 0:
            raise RuntimeError("out of memory")
        return "done"

    turn = CompileTurn(Path(folder), key, holder)
    tell = lambda text: print(text, flush=True)  # noqa: E731
    limit = float(patience[0]) if patience else PATIENCE_SECONDS
    print(turn.take(compile_it, stop, tell, limit) or "stopped", flush=True)


if __name__ == "__main__":
    sys.exit(run_service(main))
