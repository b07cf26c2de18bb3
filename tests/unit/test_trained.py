"""What a group has trained never goes down in /status, whoever dies and starts again."""

from typing import Any

import pytest

from common.contracts.control_messages import GroupAccount
from services.control_plane.registry import Registry
from services.control_plane.status import GroupStatus
from services.control_plane.view import build_status
from tests.heartbeats import RUN, beat, goodbye, ring_report, target_report, worker_report

RESUMED = {"step": 80, "trained_rows": 80, "trained_tokens": 800}
KILLED = {"step": 95, "trained_rows": 95, "trained_tokens": 950, "checkpoint": "step-000080"}


class Run:
    """A control plane that hears of one group."""

    def __init__(self) -> None:
        self.now = 0.0
        self.start_again()

    def start_again(self) -> None:
        self.registry = Registry(RUN, 0.5, lambda: self.now)

    def worker(self, session: int, number: int = 1, name: str = "main-0", **report: Any) -> None:
        told = worker_report(**report) if report else None
        phase = "running" if report else "loading"
        self.registry.take_heartbeat(
            beat("drafter_worker", session, number, instance=name, phase=phase, report=told)
        )

    def target(self, session: int = 11, number: int = 1, **counts: int) -> None:
        fields = dict.fromkeys(GroupAccount.model_fields, 0) | {"group": "main"} | counts
        ring = ring_report(groups=(GroupAccount.model_validate(fields),))
        self.registry.take_heartbeat(
            beat("target_server", session, number, report=target_report(ring=ring))
        )

    def group(self) -> GroupStatus:
        (group,) = build_status(self.registry.snapshot(), RUN, "runs/demo").groups
        return group

    def figures(self) -> tuple[int, int]:
        return self.group().trained_rows, self.group().trained_tokens


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_successor_that_loads_and_resumes_takes_nothing_away(has_ended: bool) -> None:
    run = Run()
    run.worker(1, **KILLED)
    assert run.figures() == (95, 950)
    if has_ended:
        run.registry.take_goodbye(goodbye("drafter_worker", 1, 1))
    run.now += 5.0
    run.worker(2)
    group = run.group()
    assert (group.trained_rows, group.trained_tokens) == (95, 950)
    assert (group.step, group.last_checkpoint) == (95, "step-000080"), "until it has a step itself"
    assert (group.loss, group.num_live_workers) == (None, 0)
    run.worker(2, 2, **RESUMED)
    assert run.figures() == (95, 950)
    assert run.group().step == 80
    run.worker(2, 3, step=97, trained_rows=97, trained_tokens=970)
    assert run.figures() == (97, 970)


def test_what_others_train_counts_while_a_successor_loads() -> None:
    run = Run()
    run.worker(1, **KILLED)
    run.worker(5, name="main-1", trained_rows=50, trained_tokens=500)
    assert run.figures() == (145, 1450)
    run.now += 5.0
    run.worker(2)
    run.worker(5, 2, name="main-1", trained_rows=60, trained_tokens=600)
    assert run.figures() == (155, 1550)


def test_two_successors_that_only_load_keep_the_figures_of_the_first_of_them() -> None:
    run = Run()
    run.worker(1, **KILLED)
    for session in (2, 3):
        run.now += 5.0
        run.worker(session)
    assert run.group().step == 95


def test_a_worker_that_is_back_before_the_other_is_silent_counts_once() -> None:
    run = Run()
    run.worker(1, **KILLED)
    run.worker(2, **RESUMED)
    assert run.figures() == (95, 950)


def test_a_target_that_starts_again_takes_nothing_away() -> None:
    run = Run()
    run.worker(1, trained_rows=40)
    run.target(consumed=90, settled_before=5)
    assert run.figures()[0] == 95
    run.target(12, settled_before=80)
    assert run.figures()[0] == 95
    run.target(12, 2, settled_before=80, consumed=20)
    assert run.figures()[0] == 100


def test_a_control_plane_that_starts_while_a_worker_loads_knows_the_accounts() -> None:
    run = Run()
    run.worker(1, **KILLED)
    run.target(consumed=60, settled_before=35)
    assert run.figures()[0] == 95
    run.start_again()
    run.target(number=2, consumed=60, settled_before=35)
    run.worker(2)
    assert run.figures()[0] == 95
