"""A copy is believed only if the header behind it is the descriptor's, all of it."""

import pytest

from common.contracts.ring_messages import Descriptor, LeaseRef, NackReason
from common.ring.layout import SlotHeader, SlotLayout, pack_header
from common.ring.lease import Lease
from common.ring.slot_memory import HostSlot
from tests.rings import EPOCH, make_schema

LAYOUT = SlotLayout(make_schema())


class Answers:
    """Notes how leases end."""

    def __init__(self) -> None:
        self.reasons: list[NackReason | None] = []

    def finish(self, lease: Lease, reason: NackReason | None) -> bool:
        self.reasons.append(reason)
        return reason is None


def make_lease(header: SlotHeader | None = None) -> Lease:
    slot = bytearray(LAYOUT.slot_bytes)
    told = Descriptor(
        ring_epoch=EPOCH, session=1, lease=LeaseRef(slot=2, generation=3, lease_id=4), sequence=5,
        split="train", attempt=0, used_tokens=1, num_bytes=LAYOUT.payload_bytes,
        token_hash=LAYOUT.hash_tokens(memoryview(slot)),
    )  # fmt: skip
    if header is not None:
        packed = pack_header(header)
        slot[: len(packed)] = packed
    return Lease(Answers(), told, HostSlot(memoryview(slot), 0), LAYOUT)


HEADER = SlotHeader(
    ring_epoch=EPOCH, slot=2, generation=3, sequence=5, split="train", used_tokens=1,
    num_documents=0, payload_bytes=LAYOUT.payload_bytes, token_hash=0, payload_hash=0,
    schema_fingerprint=LAYOUT.fingerprint,
)  # fmt: skip


def tokens_of(lease: Lease) -> bytes:
    return lease.read("token_ids")


def test_a_copy_with_the_descriptor_s_header_is_intact() -> None:
    lease = make_lease(HEADER)
    assert lease.is_intact(tokens_of(lease))
    assert lease.is_payload_intact()


@pytest.mark.parametrize(
    "field", ["ring_epoch", "slot", "generation", "sequence", "schema_fingerprint"]
)
def test_a_header_that_differs_in_any_identity_is_not(field: str) -> None:
    lease = make_lease(HEADER._replace(**{field: getattr(HEADER, field) + 1}))
    assert not lease.is_intact(tokens_of(lease))
    assert not lease.is_payload_intact()


def test_a_slot_that_is_being_written_is_not_intact_and_raises_nothing() -> None:
    lease = make_lease()
    assert not lease.is_intact(tokens_of(lease))
    assert not lease.is_payload_intact()


def test_a_copy_that_differs_from_what_was_published_is_not_intact() -> None:
    lease = make_lease(HEADER)
    assert not lease.is_intact(b"\x01" + tokens_of(lease)[1:])


def test_a_lease_ends_through_its_holder() -> None:
    lease = make_lease(HEADER)
    lease.release()
    lease.nack("torn")
    assert lease._holder.reasons == [None, "torn"]  # type: ignore[attr-defined]
