"""Log lines of every process: time, level, service, instance, run, message, on stderr."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-8s {service}/{instance} run={run} %(name)s: %(message)s"


def configure(service: str, instance: str, run: str, level: str) -> None:
    """Send every logger's lines to stderr in the project's form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(FORMAT.format(service=service, instance=instance, run=run))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "torch._dynamo", "torch._inductor"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
