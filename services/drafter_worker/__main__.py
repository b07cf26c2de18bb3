"""`python -m services.drafter_worker`: parse, claim an index, build, train."""

import contextlib
import os
import sys
import threading

from common.config.command_line import parse
from common.contracts.control_messages import Command, Phase
from common.lifecycle import run_service
from common.telemetry import logs
from common.telemetry.control_link import ControlLink, Identity, ServiceState
from services.drafter_worker.config import WorkerConfig


def main(stop: threading.Event) -> None:
    """Train until the stream ends or a stop is asked for."""
    config = parse(WorkerConfig, "drafter_worker")
    if config is None:
        return
    directory, group = config.run.directory, config.training.group
    # Heavy imports come after the config is known to be good.
    from services.drafter_worker.checkpoint import claim_index

    index, claim = claim_index(directory / "checkpoints" / group, f"worker {os.getpid()}")
    instance = f"{group}-{index}"
    logs.configure("drafter_worker", instance, config.run.name, config.run.log_level)
    with claim, contextlib.ExitStack() as stack:
        current = _Current()
        link = ControlLink(
            Identity("drafter_worker", instance, config.run.name),
            directory / "control.sock",
            interval_seconds=config.control_plane.heartbeat_seconds,
            describe=current.describe,
            on_command=current.obey,
        )
        stack.enter_context(link)
        from services.drafter_worker.assemble import open_worker

        current.worker = open_worker(config, index, instance, stop, stack, current.enter)
        current.worker.run()


class _Current:
    """The worker once it exists, and the phase until then."""

    def __init__(self) -> None:
        self.worker = None
        self._phase: Phase = "loading"

    def enter(self, phase: Phase) -> None:
        self._phase = phase

    def describe(self) -> ServiceState:
        return self.worker.describe() if self.worker else ServiceState(self._phase)

    def obey(self, command: Command) -> None:
        if self.worker:
            self.worker.obey(command)


if __name__ == "__main__":
    sys.exit(run_service(main))
