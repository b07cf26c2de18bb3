"""Small rings for tests."""

from collections.abc import Callable
from pathlib import Path

from common.config.shared import GroupTable, RingTable
from common.contracts.rows import DocumentSpan, RowSchema
from common.ring.owner import RingOwner


def make_schema(**changes: object) -> RowSchema:
    """Return the schema of tiny rows."""
    values: dict = {
        "row_tokens": 128,
        "max_documents": 4,
        "hidden_size": 8,
        "target_layer_ids": (1, 2),
        "aux_dtype": "bfloat16",
        "has_last_hidden_states": False,
        "target_fingerprint": "target",
        "template_fingerprint": "template",
        "feature_engine": "test",
    }
    return RowSchema(**{**values, **changes})


def make_table(**changes: object) -> RingTable:
    """Return quick timings."""
    values: dict = {
        "num_slots": 4,
        "capacity": 2,
        "heartbeat_seconds": 0.05,
        "session_timeout_seconds": 1.0,
        "lease_seconds": 0.5,
        "lease_max_seconds": 1.5,
        "resume_wait_seconds": 0.2,
    }
    return RingTable(**{**values, **changes})


def make_groups(*names: str, **changes: object) -> dict[str, GroupTable]:
    """Return groups by name."""
    return {name: GroupTable(**changes) for name in names or ("main",)}


def pattern(sequence: int) -> bytes:
    """Return the bytes that fill a field of row `sequence`."""
    return bytes([(sequence * 37 + 11) % 251])


def publish(owner: RingOwner, sequence: int, timeout: float = 10.0) -> None:
    """Write and publish one row whose fields hold its pattern."""
    writable = owner.loan(timeout)
    assert writable is not None, "the ring stayed full"
    with writable:
        for name in ("token_ids", "aux_hidden_states"):
            view = writable.field(name)
            view[:] = pattern(sequence) * len(view)
        documents = (DocumentSpan(sample_id=sequence, tag=0, start=0, length=100),)
        writable.publish(sequence=sequence, split="train", used_tokens=100, documents=documents)


Owners = Callable[..., RingOwner]


def endpoint_in(directory: Path) -> Path:
    """Return a socket path short enough for the kernel."""
    return directory / "target-0.sock"
