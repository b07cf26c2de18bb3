"""`python -m services.target_server`: parse, claim a ring, build, capture."""

import contextlib
import sys
import threading

from common.config.command_line import parse
from common.lifecycle import heavy_imports, run_service
from common.telemetry import logs
from common.telemetry.control_link import ControlLink, Identity
from common.telemetry.late import LateService
from services.target_server.claim import claim_shard
from services.target_server.config import TargetServerConfig


def main(stop: threading.Event) -> None:
    """Publish rows until every group has committed them, or a stop is asked for."""
    config = parse(TargetServerConfig, "target_server")
    if config is None:
        return
    run = config.run
    # First of all: workers tell by the lock whether a target is coming.
    shard, claim = claim_shard(
        run.directory, config.target.replicas, f"target server of run {run.name!r}"
    )
    instance = f"target-{shard.index}"
    logs.configure("target_server", instance, run.name, run.log_level)
    with claim, contextlib.ExitStack() as stack:
        summary = run.directory / f"{instance}.summary.json"
        summary.unlink(missing_ok=True)
        late = LateService()
        link = ControlLink(
            Identity("target_server", instance, run.name),
            run.directory / "control.sock",
            interval_seconds=config.control_plane.heartbeat_seconds,
            describe=late.describe,
            on_command=late.obey,
        )
        stack.enter_context(link)
        # They come after the config is known to be good.
        with heavy_imports():
            from services.target_server.assemble import open_server

        server = open_server(config, shard, summary, stop, stack)
        late.bind(server)
        server.run()


if __name__ == "__main__":
    sys.exit(run_service(main))
