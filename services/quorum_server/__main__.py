"""`python -m services.quorum_server`: parse, serve."""

import sys
import threading

from common.config.command_line import parse
from common.lifecycle import run_service
from common.telemetry import logs
from services.quorum_server.config import QuorumServerConfig
from services.quorum_server.server import serve


def main(stop: threading.Event) -> None:
    """Serve the groups that the config names."""
    config = parse(QuorumServerConfig, "quorum_server")
    if config is None:
        return
    logs.configure("quorum_server", "quorum-server", config.run.name, config.run.log_level)
    serve(config, stop)


if __name__ == "__main__":
    sys.exit(run_service(main))
