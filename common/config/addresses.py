"""Addresses of rings in a config: `ipc`, or a port of this machine."""

import re
from ipaddress import ip_address

IPC = "ipc"
_TCP = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([1-9][0-9]{0,4})")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `tcp://host:port`, or raise `ValueError` saying what is wrong."""
    found = _TCP.fullmatch(address)
    port = int(found[3]) if found else 0
    if found is None or port > 65535:
        raise ValueError(
            f"got {address!r}, expected 'ipc' or 'tcp://<host>:<port>' with a port from 1 to 65535, "
            f"such as 'tcp://127.0.0.1:5555' or 'tcp://[::1]:5555'"
        )
    return found[1] or found[2], port


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback, by its number or by the name every machine has."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
