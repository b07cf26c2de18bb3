"""The two state machines of a ring, as two enums and two tables.

    slot      FREE -loan-> WRITING -publish-> PUBLISHED -free-> FREE        WRITING -abort-> FREE
    delivery  READY -lease-> LEASED -release-> RELEASED      LEASED -requeue-> READY
              READY -skip-> SKIPPED      LEASED -poison-> POISON

A delivery is one row's way to one group. A slot is freed when every delivery of it is terminal.
"""

from enum import StrEnum

from common.errors import SlotStateError


class SlotState(StrEnum):
    """State of a slot."""

    FREE = "free"
    WRITING = "writing"
    PUBLISHED = "published"


class DeliveryState(StrEnum):
    """State of a (slot, group) delivery."""

    READY = "ready"
    LEASED = "leased"
    RELEASED = "released"
    SKIPPED = "skipped"
    POISON = "poison"


SLOT_TRANSITIONS = {
    (SlotState.FREE, "loan"): SlotState.WRITING,
    (SlotState.WRITING, "publish"): SlotState.PUBLISHED,
    (SlotState.WRITING, "abort"): SlotState.FREE,
    (SlotState.PUBLISHED, "free"): SlotState.FREE,
}

DELIVERY_TRANSITIONS = {
    (DeliveryState.READY, "lease"): DeliveryState.LEASED,
    (DeliveryState.LEASED, "release"): DeliveryState.RELEASED,
    (DeliveryState.LEASED, "requeue"): DeliveryState.READY,
    (DeliveryState.LEASED, "poison"): DeliveryState.POISON,
    (DeliveryState.READY, "skip"): DeliveryState.SKIPPED,
}

TERMINAL = frozenset({DeliveryState.RELEASED, DeliveryState.SKIPPED, DeliveryState.POISON})


def next_slot_state(slot: int, state: SlotState, event: str) -> SlotState:
    """Return the state after `event`, or raise `SlotStateError`."""
    try:
        return SLOT_TRANSITIONS[state, event]
    except KeyError:
        raise SlotStateError(
            f"slot {slot}: {event!r} is not allowed in state {state.value!r}"
        ) from None


def next_delivery_state(slot: int, group: str, state: DeliveryState, event: str) -> DeliveryState:
    """Return the state after `event`, or raise `SlotStateError`."""
    try:
        return DELIVERY_TRANSITIONS[state, event]
    except KeyError:
        raise SlotStateError(
            f"slot {slot}, group {group!r}: {event!r} is not allowed in state {state.value!r}"
        ) from None
