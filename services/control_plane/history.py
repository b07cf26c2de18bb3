"""Remembers a run's figures and events within bounds, so that who comes late sees the past.

    status, once a second --> [thinned .. the whole run ..][.. every one of the last minutes]

Of the whole run every sample is kept at first; when there is no more room, every second one goes,
and from then on half as many are taken. So a run of days still shows from its start. Each kind of
event has room of its own: what comes often, such as checkpoints, takes none from what comes seldom.
"""

import threading
import time
from collections import defaultdict, deque
from itertools import chain

from services.control_plane.changes import Event, EventKind, find_changes, make_event
from services.control_plane.status import GroupStatus, Model, RingStatus, Status

RECENT_SAMPLES = 300
THINNED_SAMPLES = 500
KEPT_EVENTS = 200
"""Of each kind, the last ones."""


class GroupSample(Model):
    """One drafter's figures at one moment, as in `groups` of /status."""

    step: int
    tokens_per_second: float
    loss: float | None
    accepted_prefix_length: float | None
    acceptance_length: float | None
    held_out_acceptance_length: float | None
    held_out_step: int | None


class Sample(Model):
    """A run's figures at one moment, as in /status."""

    time: float
    target_tokens_per_second: float
    blocked_share: float | None
    starved_share: float | None
    ring_used_shares: dict[str, float]
    """Slots that are not free, of all; by the ring's instance."""
    groups: dict[str, GroupSample]
    """By name."""


class History(Model):
    """What /history answers; both lists are in the order of their times."""

    samples: tuple[Sample, ...]
    events: tuple[Event, ...]


class Recorder:
    """Keeps the history since this control plane started; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[Sample] = deque(maxlen=RECENT_SAMPLES)
        self._thinned: list[Sample] = []
        self._stride = 1
        self._num_taken = 0
        self._events: dict[EventKind, deque[Event]] = defaultdict(lambda: deque(maxlen=KEPT_EVENTS))
        self._before: Status | None = None

    def take(self, status: Status) -> None:
        """Note a status; the first one is what later ones are compared with."""
        sample = make_sample(status)
        with self._lock:
            if self._before is not None:
                for event in find_changes(self._before, status):
                    self._events[event.kind].append(event)
            self._before = status
            self._recent.append(sample)
            if self._num_taken % self._stride == 0:
                self._thinned.append(sample)
            self._num_taken += 1
            if len(self._thinned) == THINNED_SAMPLES:
                self._thinned = self._thinned[::2]
                self._stride *= 2

    def note(self, kind: EventKind, instance: str, text: str) -> None:
        """Add an event that no status shows."""
        with self._lock:
            self._events[kind].append(make_event(time.time(), kind, instance, text))

    def since(self, after: float) -> History:
        """Return what has a later time than `after`, in seconds since 1970; 0 for everything."""
        with self._lock:
            start = self._recent[0].time if self._recent else 0.0
            # A command may be noted between a status and what came of it.
            events = sorted(chain(*self._events.values()), key=lambda event: event.time)
            samples = [*(sample for sample in self._thinned if sample.time < start), *self._recent]
        return History(
            samples=tuple(sample for sample in samples if sample.time > after),
            events=tuple(event for event in events if event.time > after),
        )


def make_sample(status: Status) -> Sample:
    """Return the figures that are kept of a status."""
    return Sample(
        time=status.time,
        target_tokens_per_second=status.target.tokens_per_second,
        blocked_share=status.bottleneck.blocked_share,
        starved_share=status.bottleneck.starved_share,
        ring_used_shares={ring.instance: _used_share(ring) for ring in status.rings},
        groups={group.group: _group_sample(group) for group in status.groups},
    )


def _used_share(ring: RingStatus) -> float:
    total = sum(ring.slots.values())
    return 1.0 - ring.slots.get("free", 0) / total if total else 0.0


def _group_sample(group: GroupStatus) -> GroupSample:
    return GroupSample.model_validate(group.model_dump(include=set(GroupSample.model_fields)))
