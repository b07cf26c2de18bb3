"""Random schedules of kills, stops, ends and restarts: every row is accounted for after each."""

import heapq
import random
import signal
import time
from typing import Any

import pytest

from tests.ring_proxy import QUIET, Noise, Proxy
from tests.ring_scene import Scene
from tests.rings import endpoint_in

NAMES = ("owner", "one", "two")
ROWS = 60
WINDOW_SECONDS = 1.2
TABLE = {
    "lease_seconds": 0.2, "lease_max_seconds": 0.5, "session_timeout_seconds": 0.4,
    "resume_wait_seconds": 0.2,
}  # fmt: skip
# Two workers of one drafter; one worker each of two; the same, and the second may be left behind.
GROUPS: list[dict[str, dict[str, Any]]] = [
    {"main": {}},
    {"main": {}, "other": {}},
    {"main": {}, "other": {"policy": "skip", "group_timeout_seconds": 0.3}},
]
NOISE = Noise(lost=0.05, repeated=0.05, swapped=0.05, delayed=0.1)
# A sample each time, each number of attempts with each kind of groups; `make hammer` runs the rest.
SAMPLE = 12
SEEDS = [
    *range(SAMPLE),
    *(pytest.param(seed, marks=pytest.mark.hammer) for seed in range(SAMPLE, 200)),
]


class Schedule:
    """What happens to which process when, all of it from a seed."""

    def __init__(self, scene: Scene, seed: int, endpoint: str) -> None:
        self._scene = scene
        self._chance = random.Random(seed)
        self._down: dict[str, signal.Signals] = {}
        """Processes that are dead or stopped, and by what."""
        self.max_attempts = 2 if seed % 4 == 3 else 1000
        self.groups = GROUPS[seed % 3]
        self._options = {
            name: {
                "row_seconds": self._chance.choice([0.0, 0.01, 0.02]),
                "capacity": self._chance.randrange(1, 4),
                "commit_every": self._chance.randrange(1, 8),
                "groups": self.groups,
                "group": list(self.groups)[-1] if name == "two" else "main",
                "endpoint": endpoint,
            }
            for name in NAMES
        }
        self._table = TABLE | {
            "num_slots": self._chance.randrange(1, 6), "max_attempts": self.max_attempts,
        }  # fmt: skip
        self._events = [self._draw() for _ in range(self._chance.randrange(2, 7))]
        heapq.heapify(self._events)

    def run(self) -> None:
        """Start every process, let it all happen, and bring up again what is down."""
        for name in self._chance.sample(NAMES, 3):
            self._start(name)
        begun_at = time.monotonic()
        while self._events:
            moment, name, number, outage = heapq.heappop(self._events)
            time.sleep(max(0.0, begun_at + moment - time.monotonic()))
            if number is None:
                self._bring_back(name)
            elif self._strike(name, number):
                heapq.heappush(self._events, (moment + outage, name, None, 0.0))
        for name in list(self._down):
            self._bring_back(name)

    def _draw(self) -> tuple[float, str, signal.Signals | None, float]:
        chance = self._chance
        number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
        name = chance.choice(NAMES)
        return chance.uniform(0.0, WINDOW_SECONDS), name, number, chance.uniform(0.0, 1.0)

    def _start(self, name: str) -> None:
        kind = "owner" if name == "owner" else "worker"
        self._scene.start(kind, name, num_rows=ROWS, table=self._table, **self._options[name])

    def _strike(self, name: str, number: signal.Signals) -> bool:
        """Do it to a process that is up, or kill one that is stopped; say whether it was done."""
        before = self._down.get(name)
        if before is not None and (before, number) != (signal.SIGSTOP, signal.SIGKILL):
            return False
        if not self._scene.signal(name, number):  # the stream is over
            self._scene.wait_for_end(name)
            return False
        self._down[name] = number
        if number == signal.SIGTERM:  # which a process that has only just begun does not catch
            assert self._scene.wait_for_exit(name) in (0, -signal.SIGTERM)
        return True

    def _bring_back(self, name: str) -> None:
        """Continue what is stopped, start what is dead; another event may have done it before."""
        number = self._down.pop(name, None)
        if number == signal.SIGSTOP:
            self._scene.signal(name, signal.SIGCONT)
        elif number is not None:
            self._start(name)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_at_random_moments_lose_no_row(scene: Scene, seed: int) -> None:
    """Every fifth run has a noisy socket as well."""
    front = scene.folder / "proxy.sock"
    with Proxy(front, endpoint_in(scene.folder), NOISE if seed % 5 == 4 else QUIET, seed):
        schedule = Schedule(scene, seed, str(front) if seed % 5 == 4 else "")
        schedule.run()
        scene.wait_for_end(*NAMES)
    for group, table in schedule.groups.items():
        scene.assert_accounts_hold(group, ROWS)
        may_give_up = schedule.max_attempts == 2 or table.get("policy") == "skip"
        assert may_give_up or scene.given_up(group) == 0
