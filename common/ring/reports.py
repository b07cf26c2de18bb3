"""A ring's state as a record for people and for the control plane."""

import time

from common.contracts.control_messages import GroupAccount, RingReport
from common.contracts.ring_messages import SegmentRef
from common.ring.protocol import OwnerProtocol


def ring_report(
    protocol: OwnerProtocol, segment: SegmentRef, reason: str, refused: dict[str, int]
) -> RingReport:
    """Return slots, deliveries, accounts and counters at this moment."""
    granted = [d.lease.granted_at for d in protocol.book.leases() if d.lease is not None]
    return RingReport(
        ring_epoch=protocol.ring_epoch,
        shard=protocol.shard,
        transport=segment.backing,
        transport_reason=reason,
        num_bytes=segment.num_bytes,
        slots=protocol.book.slot_counts(),
        deliveries=protocol.book.delivery_counts(),
        oldest_lease_seconds=time.monotonic() - min(granted) if granted else 0.0,
        high_watermark=protocol.book.high_watermark,
        low_watermark=protocol.book.low_watermark,
        is_blocked=protocol.book.is_blocked(),
        groups=tuple(group_account(protocol, name) for name in protocol.ledgers),
        absent_groups=protocol.policies.absent(time.monotonic()),
        stale_calls=dict(protocol.stale_calls),
        refused_messages=refused,
        reclaimed=dict(protocol.reclaimed),
    )


def group_account(protocol: OwnerProtocol, name: str) -> GroupAccount:
    """Return a group's accounts: published = released + poison + skipped + in the ring (R6)."""
    counts, ledger = protocol.book.accounts[name], protocol.ledgers[name]
    consumed = {entry.session: entry.consumed for entry in protocol.sessions.of_group(name)}
    return GroupAccount(
        group=name,
        published=counts["published"],
        released=counts["released"],
        poison=counts["poison"],
        skipped=counts["skipped"],
        in_ring=protocol.book.in_ring(name),
        consumed=ledger.num_consumed(consumed),
        committed=ledger.num_committed,
        settled_before=ledger.num_settled_before,
        open=ledger.num_open,
        requeued=counts["requeued"],
        recaptured=ledger.counts["recaptured"],
        poison_late=counts["poison_late"],
    )
