"""`python -m services.control_plane`: parse, build, serve."""

import sys
import threading

from common.config.command_line import parse
from common.lifecycle import run_service
from common.telemetry import logs
from services.control_plane.config import ControlPlaneConfig
from services.control_plane.server import build

_SWITCH_SECONDS = 0.0005


def main(stop: threading.Event) -> None:
    """Serve the run that the config names."""
    config = parse(ControlPlaneConfig, "control_plane")
    if config is None:
        return
    logs.configure("control_plane", "control-plane", config.run.name, config.run.log_level)
    # /healthz waits for the interpreter while another thread renders: not for five milliseconds each
    # time that it wants it.
    sys.setswitchinterval(_SWITCH_SECONDS)
    build(config, stop).run()


if __name__ == "__main__":
    sys.exit(run_service(main))
