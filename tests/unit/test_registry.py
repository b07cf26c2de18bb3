"""What the registry makes of heartbeats: sessions, conditions, commands, bottleneck, status."""

import math

import pytest

from common.contracts.control_messages import AbsentGroup
from common.contracts.sequences import shards_of
from services.control_plane.health import find_bottleneck, is_silent, is_stalled
from services.control_plane.metrics import render
from services.control_plane.registry import InstanceView, Registry
from services.control_plane.status import Status
from services.control_plane.view import build_status
from tests.heartbeats import (
    RUN,
    beat,
    evaluation,
    evaluator_report,
    goodbye,
    ring_report,
    target_report,
    worker_report,
)

HEARTBEAT_SECONDS = 0.5


class Clock:
    """A time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(RUN, HEARTBEAT_SECONDS, clock)


def only(registry: Registry) -> InstanceView:
    (view,) = registry.snapshot().instances
    return view


def status_of(registry: Registry) -> Status:
    return build_status(registry.snapshot(), RUN, "runs/demo")


def run_both(registry: Registry, clock: Clock, blocked: float, starved: float) -> None:
    """Send ten seconds of heartbeats in which each side waits for its share of the time."""
    for number in range(1, 22):
        seconds = number * HEARTBEAT_SECONDS
        clock.now += HEARTBEAT_SECONDS
        registry.take_heartbeat(beat("target_server", 1, number,
                                     report=target_report(blocked_seconds=blocked * seconds)))  # fmt: skip
        registry.take_heartbeat(beat("drafter_worker", 2, number,
                                     report=worker_report(starved_seconds=starved * seconds)))  # fmt: skip


def test_a_first_heartbeat_registers_and_is_answered(registry: Registry) -> None:
    reply = registry.take_heartbeat(beat("drafter_worker", session=77, number=3))
    assert (reply.session, reply.number, reply.heartbeat_seconds) == (77, 3, HEARTBEAT_SECONDS)
    assert only(registry).condition == "ok"


@pytest.mark.parametrize("number", [4, 5])
def test_a_repeated_or_late_heartbeat_is_a_counted_no_op(registry: Registry, number: int) -> None:
    registry.take_heartbeat(beat("drafter_worker", number=5, detail="kept"))
    assert registry.take_heartbeat(beat("drafter_worker", number=number, detail="late")) is None
    assert only(registry).heartbeat.detail == "kept"
    assert registry.snapshot().refused == {"stale_number": 1}


def test_a_heartbeat_of_another_run_is_refused(registry: Registry) -> None:
    assert registry.take_heartbeat(beat("drafter_worker", run="other")) is None
    assert registry.snapshot().instances == ()
    assert registry.snapshot().refused == {"foreign_run": 1}


def test_an_instance_is_silent_after_two_missed_heartbeats(
    registry: Registry, clock: Clock
) -> None:
    registry.take_heartbeat(beat("drafter_worker"))
    clock.now += 2 * HEARTBEAT_SECONDS
    assert only(registry).condition == "ok"
    clock.now += HEARTBEAT_SECONDS
    assert only(registry).condition == "silent"
    registry.take_heartbeat(beat("drafter_worker", number=2))
    assert only(registry).condition == "ok"


def test_heartbeats_without_progress_become_stalled(registry: Registry, clock: Clock) -> None:
    for number in range(1, 400):
        clock.now += HEARTBEAT_SECONDS
        report = worker_report()
        registry.take_heartbeat(beat("drafter_worker", number=number, progress=4, report=report))
    assert only(registry).condition == "stalled"
    assert only(registry).age_seconds == 0
    registry.take_heartbeat(beat("drafter_worker", number=400, progress=5))
    assert only(registry).condition == "ok"


@pytest.mark.parametrize(
    ("phase", "age", "pace", "wait_share", "stalled"),
    [
        ("running", 179, 0.1, None, False),
        ("running", 181, 0.1, None, True),
        ("running", 181, 20.0, None, False),  # ten median steps are longer than the allowance
        ("running", 201, 20.0, None, True),
        ("running", 1100, None, None, False),  # a first step, which may take long on a CPU
        ("running", 1300, None, None, True),
        ("running", 181, 0.1, 0.9, False),  # it waits for its peer
        ("running", 601, 0.1, 0.9, True),  # but not for ever
        ("compiling", 1000, None, None, False),
        ("compiling", 1300, None, None, True),
        ("measuring", 1000, 0.1, None, False),
        ("saving", 800, 0.1, None, False),
        ("paused", 1e6, 0.1, None, False),
        ("done", 1e6, 0.1, None, False),
    ],
)
def test_progress_is_overdue_after_ten_steps_or_the_phases_allowance(
    phase, age, pace, wait_share, stalled
) -> None:
    assert is_stalled(phase, age, pace, wait_share) == stalled


def test_a_service_is_judged_by_the_pace_that_it_has(registry: Registry, clock: Clock) -> None:
    """A target on a slow CPU that makes a row a minute is not stalled after three."""
    for number in range(1, 5):
        clock.now += 60.0
        registry.take_heartbeat(beat("target_server", 1, number, progress=number))
    for number in range(5, 1200):
        clock.now += HEARTBEAT_SECONDS
        registry.take_heartbeat(beat("target_server", 1, number, progress=4))
        assert only(registry).condition == "ok"
    clock.now += 3.0
    registry.take_heartbeat(beat("target_server", 1, 1200, progress=4))
    assert only(registry).condition == "stalled"


def test_measuring_and_saving_are_no_steps_that_are_late(registry: Registry, clock: Clock) -> None:
    registry.take_heartbeat(beat("drafter_worker", report=worker_report()))
    for number, phase in ((2, "measuring"), (3, "saving")):
        registry.take_heartbeat(beat("drafter_worker", 1, number, phase=phase, progress=1))
        clock.now += 600.0
        registry.take_heartbeat(beat("drafter_worker", 1, number + 10, phase=phase, progress=1))
        assert only(registry).condition == "ok"


def test_a_stalled_worker_is_named_with_who_waits_for_it(registry: Registry, clock: Clock) -> None:
    for number in range(1, 900):
        clock.now += HEARTBEAT_SECONDS
        blocked = target_report(ring=ring_report(is_blocked=True))
        registry.take_heartbeat(beat("target_server", 1, number, pid=11, report=blocked))
        registry.take_heartbeat(
            beat("drafter_worker", 2, number, pid=12, progress=4, report=worker_report())
        )
    (late,) = status_of(registry).overdue
    assert (late.instance, late.pid, late.condition, late.last_step) == (
        "worker-0",
        12,
        "stalled",
        7,
    )
    assert late.waiting == ("target-0 (pid 11, row 899)",)
    assert late.text == (
        "worker-0 (pid 12, step 7) is stalled: no progress in phase running for 449 s; "
        "target-0 (pid 11, row 899) waits for it"
    )
    assert status_of(registry).is_ready


def test_a_silent_target_is_named_with_the_workers_that_starve(
    registry: Registry, clock: Clock
) -> None:
    registry.take_heartbeat(beat("target_server", 1, pid=11, progress=9, report=target_report()))
    clock.now += 5.0
    for session, phase in ((2, "waiting"), (3, "running")):
        registry.take_heartbeat(
            beat("drafter_worker", session, instance=f"main-{session}", pid=session, phase=phase,
                 report=worker_report())
        )  # fmt: skip
    (late,) = status_of(registry).overdue
    assert late.condition == "silent"
    assert late.text == (
        "target-0 (pid 11, row 9) is silent: no heartbeat for 5 s; main-2 (pid 2, step 7) waits for it"
    )


def test_silence_counts_in_intervals() -> None:
    assert not is_silent(1.0, 0.5)
    assert is_silent(1.5, 0.5)


def test_a_goodbye_ends_a_session_and_later_messages_change_nothing(registry: Registry) -> None:
    registry.take_heartbeat(beat("drafter_worker", number=1))
    registry.take_goodbye(goodbye("drafter_worker"))
    assert registry.take_heartbeat(beat("drafter_worker", number=2)) is None
    registry.take_goodbye(goodbye("drafter_worker"))
    registry.take_goodbye(goodbye("drafter_worker", session=99))
    assert only(registry).condition == "ended"
    assert registry.snapshot().refused == {"ended_session": 2, "unknown_session": 1}


def test_a_failed_goodbye_is_a_failure_and_an_error(registry: Registry) -> None:
    registry.take_heartbeat(beat("drafter_worker"))
    registry.take_goodbye(goodbye("drafter_worker", exit_code=1, reason="NaN in the loss"))
    assert only(registry).condition == "failed"
    (error,) = registry.snapshot().errors
    assert (error.instance, error.text) == ("worker-0", "exit code 1: NaN in the loss")


def test_an_error_in_every_heartbeat_is_listed_once(registry: Registry) -> None:
    for number in (1, 2, 3):
        registry.take_heartbeat(beat("target_server", number=number, errors=("disk is slow",)))
    assert [error.text for error in registry.snapshot().errors] == ["disk is slow"]


def test_a_session_takes_the_place_of_a_silent_one_of_its_name(
    registry: Registry, clock: Clock
) -> None:
    registry.take_heartbeat(beat("drafter_worker", session=1))
    clock.now += 10
    registry.take_heartbeat(beat("drafter_worker", session=2))
    assert only(registry).heartbeat.session == 2


def test_messages_that_a_worker_refused_are_counted_by_reason(registry: Registry) -> None:
    registry.take_heartbeat(beat("drafter_worker", report=worker_report()))
    text = render(status_of(registry)).decode()
    labels = 'group="main",index="0",instance="worker-0",reason="malformed"'
    assert f"drafter_refused_messages_total{{{labels}}} 2.0" in text


def test_a_ring_is_its_newest_owner_s_and_a_killed_one_is_forgotten_when_it_is_silent(
    registry: Registry, clock: Clock
) -> None:
    old, new = (target_report(ring=ring_report(ring_epoch=epoch)) for epoch in (1, 2))
    registry.take_heartbeat(beat("target_server", session=9, report=old))
    registry.take_heartbeat(beat("target_server", session=5, report=new))
    status = status_of(registry)
    assert [ring.ring_epoch for ring in status.rings] == [f"{2:016x}"]
    samples = [
        line.split(" ")[0] for line in render(status).decode().splitlines() if line[0] != "#"
    ]
    assert len(samples) == len(set(samples))
    clock.now += 10
    registry.take_heartbeat(beat("target_server", session=5, number=2, report=new))
    assert only(registry).heartbeat.session == 5


def test_two_live_processes_under_one_name_are_both_seen(registry: Registry) -> None:
    registry.take_heartbeat(beat("drafter_worker", session=1))
    registry.take_heartbeat(beat("drafter_worker", session=2))
    assert {view.heartbeat.session for view in registry.snapshot().instances} == {1, 2}


def test_a_registry_that_starts_empty_knows_all_again_after_one_interval(clock: Clock) -> None:
    beats = [beat("target_server", 1, 50, report=target_report()),
             beat("drafter_worker", 2, 60, report=worker_report()),
             beat("evaluator", 3, 70, report=evaluator_report())]  # fmt: skip
    statuses = []
    for _ in range(2):
        registry = Registry(RUN, HEARTBEAT_SECONDS, clock)
        for message in beats:
            assert registry.take_heartbeat(message) is not None
        statuses.append(status_of(registry).model_dump(exclude={"time"}))
    assert statuses[0] == statuses[1]


def test_a_command_is_repeated_in_every_reply_and_reaches_later_sessions(
    registry: Registry,
) -> None:
    registry.take_heartbeat(beat("drafter_worker", session=1))
    pause, num_recipients = registry.command("pause")
    assert num_recipients == 1
    for number in (2, 3):
        assert registry.take_heartbeat(beat("drafter_worker", 1, number)).commands == (pause,)
    assert registry.take_heartbeat(beat("drafter_worker", session=2)).commands == (pause,)


def test_a_newer_command_for_the_run_replaces_the_older(registry: Registry) -> None:
    pause, _ = registry.command("pause")
    resume, _ = registry.command("resume")
    assert resume.number > pause.number
    assert registry.take_heartbeat(beat("drafter_worker")).commands == (resume,)


def test_numbers_of_commands_rise_over_a_restart(clock: Clock) -> None:
    first, _ = Registry(RUN, HEARTBEAT_SECONDS, clock).command("pause")
    second, _ = Registry(RUN, HEARTBEAT_SECONDS, clock).command("pause")
    assert second.number >= first.number > 1_000_000_000


def test_a_checkpoint_goes_to_the_workers_of_its_moment_only(registry: Registry) -> None:
    registry.take_heartbeat(beat("drafter_worker", session=1))
    registry.take_heartbeat(beat("target_server", session=2))
    checkpoint, num_recipients = registry.command("checkpoint")
    assert num_recipients == 1
    assert registry.take_heartbeat(beat("drafter_worker", 1, 2)).commands == (checkpoint,)
    assert registry.take_heartbeat(beat("target_server", 2, 2)).commands == ()
    assert registry.take_heartbeat(beat("drafter_worker", session=3)).commands == ()


def test_a_drain_goes_to_those_who_take_rows(registry: Registry) -> None:
    drain, _ = registry.command("drain")
    assert registry.take_heartbeat(beat("target_server", session=1)).commands == ()
    assert registry.take_heartbeat(beat("drafter_worker", session=2)).commands == (drain,)


@pytest.mark.parametrize(
    ("blocked", "starved", "name"),
    [(0.7, 0.0, "drafter"), (0.0, 0.7, "target"), (0.4, 0.5, "transport"), (0.01, 0.02, "unknown")],
)
def test_the_bottleneck_is_the_other_side_of_the_one_that_waits(
    registry, clock, blocked, starved, name
) -> None:
    run_both(registry, clock, blocked, starved)
    bottleneck = status_of(registry).bottleneck
    assert bottleneck.name == name
    assert bottleneck.blocked_share == pytest.approx(blocked)
    assert bottleneck.starved_share == pytest.approx(starved)


def test_the_bottleneck_is_unknown_without_both_sides() -> None:
    assert find_bottleneck([0.5], [])[0] == "unknown"
    assert find_bottleneck([], [0.5])[0] == "unknown"


def test_ready_needs_a_ring_and_a_worker_that_runs(registry: Registry, clock: Clock) -> None:
    assert "none has sent a heartbeat" in status_of(registry).not_ready_reason
    registry.take_heartbeat(beat("target_server", 1, phase="loading", detail="reading weights"))
    assert "reading weights" in status_of(registry).not_ready_reason
    registry.take_heartbeat(beat("target_server", 1, 2, report=target_report()))
    registry.take_heartbeat(beat("drafter_worker", 2, phase="compiling", report=worker_report()))
    assert "worker-0 is ok in phase compiling" in status_of(registry).not_ready_reason
    registry.take_heartbeat(beat("drafter_worker", 2, 2, report=worker_report()))
    assert status_of(registry).is_ready
    clock.now += 60
    assert "target-0 is silent" in status_of(registry).not_ready_reason


def test_groups_sum_workers_and_rings_and_know_their_last_evaluation(registry: Registry) -> None:
    registry.take_heartbeat(beat("target_server", 1, report=target_report()))
    registry.take_heartbeat(beat("drafter_worker", 2, instance="a", report=worker_report(loss=2.0)))
    registry.take_heartbeat(
        beat("drafter_worker", 3, instance="b", report=worker_report(index=1, step=9, loss=4.0))
    )
    registry.add_evaluations([evaluation(), evaluation(checkpoint="elsewhere", step=900)])
    (group,) = status_of(registry).groups
    assert (group.group, group.num_live_workers, group.step) == ("main", 2, 9)
    assert group.num_members == 2
    assert (group.trained_rows, group.tokens_per_second, group.loss) == (14, 1024.0, 3.0)
    assert group.acceptance_length == 2.5
    assert group.account.published == 11


def test_each_target_has_its_ring_and_the_run_s_length_is_no_sum(registry: Registry) -> None:
    for index, shard in enumerate(shards_of(2)):
        report = target_report(ring=ring_report(shard=shard), captured_tokens=100)
        registry.take_heartbeat(
            beat("target_server", index + 1, instance=f"target-{index}", report=report)
        )
    status = status_of(registry)
    assert [(ring.instance, ring.shard) for ring in status.rings] == [
        ("target-0", shards_of(2)[0]), ("target-1", shards_of(2)[1])
    ]  # fmt: skip
    assert (status.target.total_rows, status.target.captured_tokens) == (64, 200)
    assert status.groups[0].account.published == 22


def test_a_group_without_a_worker_that_blocks_a_ring_is_named_while_its_target_lives(
    registry: Registry, clock: Clock
) -> None:
    away = AbsentGroup(group="away", absent_seconds=12.4, num_waiting=8, is_blocking=True,
                       is_detached=False)  # fmt: skip
    report = target_report(ring=ring_report(absent_groups=(away,), is_blocked=True))
    registry.take_heartbeat(beat("target_server", 1, report=report))
    status = status_of(registry)
    assert status.rings[0].absent_groups == (away,)
    assert status.bottleneck.name == "drafter"
    assert "group 'away' has had no worker for 12 s and blocks target-0" in status.bottleneck.reason
    sample = 'ring_absent_group_seconds{group="away",instance="target-0",state="waiting"} 12.4'
    assert sample in render(status).decode()
    clock.now += 60
    assert "away" not in status_of(registry).bottleneck.reason


def test_the_ring_epoch_survives_json_as_text(registry: Registry) -> None:
    registry.take_heartbeat(beat("target_server", report=target_report(ring=ring_report())))
    assert status_of(registry).rings[0].ring_epoch == f"{(1 << 63) + 12345:016x}"


def test_a_loss_that_is_not_a_number_becomes_null_in_json(registry: Registry) -> None:
    registry.take_heartbeat(beat("drafter_worker", report=worker_report(loss=math.nan)))
    text = status_of(registry).model_dump_json()
    assert "NaN" not in text
    assert Status.model_validate_json(text).workers[0].report.loss is None


def test_groups_are_compared_by_both_figures_of_acceptance(registry: Registry) -> None:
    figures = worker_report().held_out
    for number, (group, length) in enumerate([("a", 1.5), ("a", 2.5), ("b", 3.0), ("c", 0.0)]):
        walked = figures[0].model_copy(update={"acceptance_length": length})
        report = worker_report(
            group=group, index=number, held_out_step=4 + number, held_out=(walked,) * (length > 0)
        )
        beats = beat("drafter_worker", number + 1, instance=f"{group}-{number}", report=report)
        registry.take_heartbeat(beats)
    results = tuple(
        evaluation(checkpoint=f"r/checkpoints/{group}/0/step-000005", acceptance_length=length)
        for group, length in (("a", 1.875), ("b", 2.75))
    )
    registry.add_evaluations(results)
    found = [
        (g.group, g.acceptance_length, g.held_out_acceptance_length, g.held_out_step)
        for g in status_of(registry).groups
    ]
    assert found == [("a", 1.875, 2.0, 4), ("b", 2.75, 3.0, 6), ("c", None, None, None)]


@pytest.mark.parametrize(
    ("shares", "name", "named"),
    [
        ({"fast": 0.9, "slow": 0.0}, "drafter", "the others wait for group 'slow'"),
        ({"fast": 0.9, "slow": 0.85}, "transport", "both wait"),
        ({"only": 0.0}, "drafter", "than they are trained"),
    ],
)
def test_of_several_groups_the_slowest_is_the_bottleneck(
    registry: Registry, clock: Clock, shares: dict[str, float], name: str, named: str
) -> None:
    for number in range(1, 22):
        clock.now += HEARTBEAT_SECONDS
        seconds = number * HEARTBEAT_SECONDS
        registry.take_heartbeat(
            beat("target_server", 99, number, report=target_report(blocked_seconds=0.9 * seconds))
        )
        for session, (group, share) in enumerate(shares.items(), 1):
            report = worker_report(group=group, starved_seconds=share * seconds)
            registry.take_heartbeat(
                beat("drafter_worker", session, number, instance=f"{group}-0", report=report)
            )
    bottleneck = status_of(registry).bottleneck
    assert bottleneck.name == name
    assert named in bottleneck.reason
    assert ("group" in bottleneck.reason) == ("group" in named)


def test_rates_are_those_of_the_last_seconds_and_none_while_paused(
    registry: Registry, clock: Clock
) -> None:
    def come(number: int, tokens: int, phase: str = "running") -> float:
        report = worker_report(trained_tokens=tokens, tokens_per_second=512.0)
        registry.take_heartbeat(
            beat("drafter_worker", 1, number, instance="a", phase=phase, report=report)
        )
        return status_of(registry).groups[0].tokens_per_second

    assert come(1, 1000) == 512.0, "too little has been seen"
    clock.now += 4
    assert come(2, 1400) == 100.0
    assert come(3, 1400, "paused") == 0.0
