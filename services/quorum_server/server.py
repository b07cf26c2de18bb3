"""A lighthouse of torchft for each synced group, on loopback.

    workers --join, heartbeat--> lighthouse --> who meets, once all that live have come
                                 (native threads)

Start order: lock, ports, then `<run_dir>/quorum.json` for its owner alone, so that who reads that
file finds a server. A lighthouse knows no key: who can reach loopback can join, and no more than
delay the group, since weights pass between workers and a member of another config is refused.

A restarted server knows nobody; members come again by themselves, and go on with what they have.
"""

import logging
import threading

from common.lifecycle import FileLock
from common.quorum import publish_addresses, start_lighthouse, withdraw_addresses
from services.quorum_server.config import QuorumServerConfig

_log = logging.getLogger(__name__)


def serve(config: QuorumServerConfig, stop: threading.Event) -> None:
    """Serve until the stop event is set."""
    directory = config.run.directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(directory / "quorum.lock", f"quorum server of run {config.run.name!r}")
    with lock.acquire(remedy="stop that one, or choose another run.directory"):
        lighthouses = {
            name: start_lighthouse(
                lease_seconds=group.sync_lease_seconds, patience_seconds=group.sync_patience_seconds
            )
            for name, group in config.synced.items()
        }
        addresses = {name: lighthouse.url for name, lighthouse in lighthouses.items()}
        publish_addresses(directory, addresses)
        _log.info("serving %s", addresses)
        stop.wait()
        withdraw_addresses(directory)
        for lighthouse in lighthouses.values():
            lighthouse.close()
