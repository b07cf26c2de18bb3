"""`python -m services.evaluator`: parse, take a GPU, evaluate."""

import sys
import threading

from common.config.command_line import parse
from common.lifecycle import heavy_imports, run_service
from common.placement.place import PlaceSeeker
from common.target.footprint import RUNTIME_BYTES, measure_target
from common.telemetry import logs
from common.telemetry.control_link import ControlLink, Identity
from common.telemetry.late import LateService
from services.evaluator.config import EvaluatorConfig


def main(stop: threading.Event) -> None:
    """Evaluate the checkpoints that the config names."""
    config = parse(EvaluatorConfig, "evaluator")
    if config is None:
        return
    logs.configure("evaluator", "evaluator", config.run.name, config.run.log_level)
    late, run = LateService(), config.run
    link = ControlLink(
        Identity("evaluator", "evaluator", run.name),
        run.directory / "control.sock",
        interval_seconds=config.control_plane.heartbeat_seconds,
        describe=late.describe,
        on_command=late.obey,
    )
    with link:
        if run.device == "cuda":
            # A second copy of the target may have no room before training has ended.
            seeker = PlaceSeeker(
                link, run.directory, config.placement, late.enter, stop,
                waits_for_ever=config.evaluation.follow,
            )  # fmt: skip
            size = measure_target(config.target)
            if seeker.take(size.weight_bytes + RUNTIME_BYTES) is None:
                return
            late.enter("loading")
        with heavy_imports():  # only after a config that holds
            from services.evaluator.evaluator import evaluate

        evaluate(config, stop, late)


if __name__ == "__main__":
    sys.exit(run_service(main))
