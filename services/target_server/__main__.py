"""`python -m services.target_server`: parse, claim a ring, take a GPU, build, capture."""

import contextlib
import sys
import threading

from common.config.command_line import parse
from common.contracts.control_messages import TargetReport
from common.errors import TargetCheckError
from common.lifecycle import heavy_imports, run_service
from common.placement.place import PlaceSeeker
from common.telemetry import logs
from common.telemetry.control_link import ControlLink, Identity
from common.telemetry.late import LateService
from services.target_server.claim import claim_shard
from services.target_server.config import TargetServerConfig
from services.target_server.estimate import target_bytes


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
        if run.device == "cuda":
            seeker = PlaceSeeker(link, run.directory, config.placement, late.enter, stop)
            if seeker.take(target_bytes(config)) is None:
                return
            late.enter("loading")
        # They come after the config is known to be good.
        with heavy_imports():
            from services.target_server.assemble import open_server

        try:
            server = open_server(config, shard, summary, stop, stack, late.enter)
        except TargetCheckError as error:
            late.enter("failed", str(error), failed_report(config.target.model, error.results))
            raise
        late.bind(server)
        server.run()


def failed_report(target: str, checks: dict[str, str]) -> TargetReport:
    """Return the report of a target that failed a start-up check: its results, and nothing made."""
    return TargetReport(
        target=target,
        total_rows=None,
        captured_tokens=0,
        capture_seconds=0.0,
        blocked_seconds=0.0,
        tokens_per_second=0.0,
        skipped_samples={},
        captured_tokens_by_tag={},
        checks=checks,
        ring=None,
    )


if __name__ == "__main__":
    sys.exit(run_service(main))
