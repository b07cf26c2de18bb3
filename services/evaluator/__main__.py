"""`python -m services.evaluator`: parse, then evaluate."""

import sys
import threading

from common.config.command_line import parse
from common.lifecycle import heavy_imports, run_service
from common.telemetry import logs
from services.evaluator.config import EvaluatorConfig


def main(stop: threading.Event) -> None:
    """Evaluate the checkpoints that the config names."""
    config = parse(EvaluatorConfig, "evaluator")
    if config is None:
        return
    logs.configure("evaluator", "evaluator", config.run.name, config.run.log_level)
    with heavy_imports():  # only after a config that holds
        from services.evaluator.evaluator import evaluate

    evaluate(config, stop)


if __name__ == "__main__":
    sys.exit(run_service(main))
