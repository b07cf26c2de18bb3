"""Each fault of each process in each state of a slot and a delivery, as one table.

A run is led to a state, in which its owner or its worker holds still. Then the owner or the worker
is killed, stopped past every timeout, or asked to end; what died is started again, or another
worker comes instead. Whatever was hit, every row is accounted for at the end.
"""

import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.contracts.sequences import SequenceSet
from tests.ring_scene import Scene

TABLE = {
    "lease_seconds": 0.3, "lease_max_seconds": 0.6, "session_timeout_seconds": 0.5,
    "resume_wait_seconds": 0.2, "max_attempts": 20,
}  # fmt: skip
PAST_EVERY_TIMEOUT_SECONDS = 1.2
ROWS = 12


@dataclass(frozen=True)
class State:
    """A state, and how a run comes to stand still in it."""

    holder: str
    point: str
    at: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Of the process that holds."""
    reached: tuple[str, str, int] | None = None
    """What the other process has written down by then: name, event, how often."""


STATES = {
    "free": State("owner", "free", 0, reached=("worker", "started", 1)),
    "writing": State("owner", "writing", 5, reached=("worker", "trained", 5)),
    "ready": State("worker", "released", 1, {"capacity": 1}, ("owner", "published", 6)),
    "leased": State("worker", "leased", 3),
    "copying": State("worker", "copying", 3),
    "released": State("worker", "released", 3),
    "consumed": State("worker", "consumed", 5),
    "saved": State("worker", "saved"),
    "ended": State("worker", "consumed", 11, {"commit_every": 99}, ("owner", "ended", 1)),
    "settled": State("worker", "settled", 0, {"commit_every": 5}),
    "drained": State("worker", "drained"),
}
FAULTS = {
    "owner killed": ("owner", signal.SIGKILL, "owner"),
    "owner asked to end": ("owner", signal.SIGTERM, "owner"),
    "owner stopped": ("owner", signal.SIGSTOP, None),
    "worker killed": ("worker", signal.SIGKILL, "worker"),
    "worker killed for good": ("worker", signal.SIGKILL, "heir"),
    "worker asked to end": ("worker", signal.SIGTERM, "worker"),
    "worker stopped": ("worker", signal.SIGSTOP, None),
}


def lead_to(scene: Scene, state: State) -> None:
    """Start a run and wait until it stands still in a state."""
    for name in ("owner", "worker"):
        hold: dict[str, Any] = {}
        if name == state.holder:
            hold = {"hold_in": state.point, "hold_at": state.at, **state.options}
        scene.start(name, name, num_rows=ROWS, table=TABLE, **hold)
    scene.wait_for(state.holder, "holding")
    if state.reached is not None:
        scene.wait_for(*state.reached)


def inflict(
    scene: Scene, holder: str, victim: str, number: signal.Signals, successor: str | None
) -> None:
    """Do it to a process; bring it, or another in its place, back; let the holder go on."""
    assert scene.signal(victim, number), f"{victim} ended before it was hit"
    if number == signal.SIGSTOP:
        time.sleep(PAST_EVERY_TIMEOUT_SECONDS)
        scene.go(holder)
        scene.signal(victim, signal.SIGCONT)
    elif number == signal.SIGTERM:
        scene.wait_for_end(victim)
    if successor is not None:
        kind = "owner" if successor == "owner" else "worker"
        scene.start(kind, successor, num_rows=ROWS, table=TABLE)
    scene.go(holder)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("state", STATES)
def test_every_row_is_accounted_for_whatever_fails_in_whatever_state(
    scene: Scene, state: str, fault: str
) -> None:
    lead_to(scene, STATES[state])
    victim, number, successor = FAULTS[fault]
    inflict(scene, STATES[state].holder, victim, number, successor)
    living = {"owner", "worker"} - ({victim} if successor == "heir" else set())
    scene.wait_for_end(*living | ({successor} if successor else set()))
    scene.assert_nothing_is_lost(num_rows=ROWS)
    assert_owners_made_nothing_that_was_durable(scene)


def assert_owners_made_nothing_that_was_durable(scene: Scene) -> None:
    """What checkpoints hold at an owner's start is settled for it."""
    for ready in scene.log("owner", "ready"):
        settled = SequenceSet.model_validate(ready["settled"]["main"], strict=False)
        made = [entry["sequence"] for entry in scene.log("owner", "publishing", ready["pid"])]
        assert not [sequence for sequence in made if sequence in settled]
