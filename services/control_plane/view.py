"""Turns a registry's snapshot into the status that people and machines read.

Pure: the same snapshot gives the same status. Every figure of /status, /metrics, /events and
the page comes from here.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from common.contracts.control_messages import (
    EvaluationResult,
    GroupAccount,
    RingReport,
    TargetReport,
    WorkerReport,
)
from common.contracts.placement_messages import GpuGrant, GpuRefusal
from services.control_plane.advice import Rate, advise
from services.control_plane.health import find_bottleneck
from services.control_plane.leases import GpuView
from services.control_plane.overdue import find_overdue
from services.control_plane.registry import InstanceView, Snapshot
from services.control_plane.status import (
    AlarmStatus,
    BottleneckStatus,
    ErrorStatus,
    EvaluationStatus,
    GpuStatus,
    GroupStatus,
    HolderStatus,
    InstanceStatus,
    RingStatus,
    RunState,
    RunStatus,
    Status,
    TargetInstance,
    TargetStatus,
    TransportStatus,
    WorkerInstance,
)
from services.control_plane.trained import Trained
from services.control_plane.windows import RATED_PHASES

_TRAINING_PHASES = ("running", "waiting", "measuring", "saving", "draining")


def build_status(snapshot: Snapshot, run: str, directory: str) -> Status:
    """Return the status of a run."""
    targets = _sorted(snapshot, "target_server")
    workers = _sorted(snapshot, "drafter_worker")
    evaluators = _sorted(snapshot, "evaluator")
    # Of two target servers under one name the later holds the ring; the other may be dead.
    owners = {view.heartbeat.instance: view for view in targets if _ring_of(view) is not None}
    rings = tuple(_ring(view, ring) for view in owners.values() if (ring := _ring_of(view)))
    evaluations = tuple(sorted(map(_evaluation, snapshot.evaluations), key=_evaluation_order))
    reason = _why_not_ready(targets, workers)
    return Status(
        time=time.time(),
        run=RunStatus(
            name=run, directory=directory, state=_run_state(targets, workers, evaluators),
            command=snapshot.run_command.name if snapshot.run_command else "",
            uptime_seconds=snapshot.uptime_seconds,
        ),
        is_ready=not reason,
        not_ready_reason=reason,
        transport=_transport(rings),
        rings=rings,
        target=_target(targets),
        workers=tuple(_worker_instance(view) for view in workers),
        groups=_groups(workers, rings, evaluations, snapshot.trained),
        evaluators=tuple(InstanceStatus(**_common(view)) for view in evaluators),
        evaluations=evaluations,
        alarms=tuple(_alarm(result) for result in evaluations if result.has_regressed),
        overdue=find_overdue(targets, workers, evaluators),
        gpus=tuple(map(_gpu, snapshot.places.gpus)),
        bottleneck=_bottleneck(targets, workers, snapshot.places.worker),
        errors=tuple(
            ErrorStatus(instance=error.instance, text=error.text, age_seconds=error.age_seconds)
            for error in snapshot.errors
        ),
        refused_messages=snapshot.refused,
    )  # fmt: skip


def _sorted(snapshot: Snapshot, service: str) -> list[InstanceView]:
    views = [view for view in snapshot.instances if view.heartbeat.service == service]
    # A stable sort: sessions of one name stay in the order in which they came.
    return sorted(views, key=lambda view: view.heartbeat.instance)


def _is_live(view: InstanceView) -> bool:
    return view.condition in ("ok", "stalled")


def _why_not_ready(targets: list[InstanceView], workers: list[InstanceView]) -> str:
    if not any(_is_live(view) and _ring_of(view) is not None for view in targets):
        return f"no target server with a ring: {_describe(targets)}"
    if not any(_is_live(view) and _trains(view, has_ring=True) for view in workers):
        return f"no drafter worker runs: {_describe(workers)}"
    return ""


def _describe(views: list[InstanceView]) -> str:
    parts = [
        f"{view.heartbeat.instance} is {view.condition} in phase {view.heartbeat.phase}"
        + (f" ({view.heartbeat.detail})" if view.heartbeat.detail else "")
        for view in views
    ]
    return ", ".join(parts) or "none has sent a heartbeat"


def _run_state(
    targets: list[InstanceView], workers: list[InstanceView], evaluators: list[InstanceView]
) -> RunState:
    """Sum the run up: a failure that nobody outlives shows first, then what the workers do."""
    if not targets and not workers:
        return "waiting"
    if _has_failed(targets) or _has_failed(workers):
        return "failed"
    if workers and all(_is_over(view) or view.condition == "failed" for view in workers):
        is_evaluated = any(_is_live(view) and not _is_over(view) for view in evaluators)
        return "evaluating" if is_evaluated else "done"
    phases = [view.heartbeat.phase for view in workers if _is_live(view) and not _is_over(view)]
    if phases and all(phase == "paused" for phase in phases):
        return "paused"
    if phases and all(phase == "draining" for phase in phases):
        return "draining"
    # One that is silent may only be late: its successor, which has none yet, takes its place.
    has_ring = any(_ring_of(view) is not None for view in targets if not _is_gone(view))
    trains = any(_trains(view, has_ring=has_ring) for view in workers if not _is_gone(view))
    return "running" if trains else "starting"


def _trains(view: InstanceView, *, has_ring: bool) -> bool:
    """Whether a worker has rows to train on, or will have: not while it waits for a GPU or for a target
    that is starting, such as one that writes the held-out answers."""
    if view.heartbeat.phase == "waiting":
        return has_ring and _worker_report(view) is not None
    return view.heartbeat.phase in _TRAINING_PHASES


def _is_gone(view: InstanceView) -> bool:
    return view.condition in ("ended", "failed")


def _has_failed(views: list[InstanceView]) -> bool:
    """Whether some have failed, and none of the others is alive or has come to its end by itself."""
    has_others = any(_is_live(view) or view.heartbeat.phase == "done" for view in views)
    return not has_others and any(view.condition == "failed" for view in views)


def _is_over(view: InstanceView) -> bool:
    return view.condition == "ended" or view.heartbeat.phase == "done"


def _common(view: InstanceView) -> dict[str, Any]:
    beat = view.heartbeat
    return {
        "service": beat.service, "instance": beat.instance, "session": f"{beat.session:016x}",
        "pid": beat.pid, "host": beat.host, "phase": beat.phase, "detail": beat.detail,
        "progress": beat.progress, "condition": view.condition,
        "heartbeat_age_seconds": view.age_seconds,
        "progress_age_seconds": view.progress_age_seconds,
        "exit_code": view.goodbye.exit_code if view.goodbye else None,
        "exit_reason": view.goodbye.reason if view.goodbye else "",
    }  # fmt: skip


def _target_report(view: InstanceView) -> TargetReport | None:
    report = view.heartbeat.report
    return report if isinstance(report, TargetReport) else None


def _worker_report(view: InstanceView) -> WorkerReport | None:
    report = view.heartbeat.report
    return report if isinstance(report, WorkerReport) else None


def _ring_of(view: InstanceView) -> RingReport | None:
    report = _target_report(view)
    return report.ring if report is not None else None


def _ring(view: InstanceView, report: RingReport) -> RingStatus:
    fields = report.model_dump(exclude={"ring_epoch"})
    return RingStatus(
        instance=view.heartbeat.instance, ring_epoch=f"{report.ring_epoch:016x}", **fields
    )


def _transport(rings: Sequence[RingStatus]) -> TransportStatus | None:
    if not rings:
        return None
    return TransportStatus(
        chosen=", ".join(sorted({ring.transport for ring in rings})),
        reason="; ".join(dict.fromkeys(ring.transport_reason for ring in rings)),
    )


def _target(targets: list[InstanceView]) -> TargetStatus:
    reports = [report for view in targets if (report := _target_report(view)) is not None]
    totals = [report.total_rows for report in reports if report.total_rows is not None]
    return TargetStatus(
        model=", ".join(sorted({report.target for report in reports})),
        tokens_per_second=sum(
            _rate(v, r) for v in targets if _is_live(v) and (r := _target_report(v))
        ),
        captured_tokens=sum(report.captured_tokens for report in reports),
        blocked_seconds=sum(report.blocked_seconds for report in reports),
        total_rows=max(totals, default=None),  # each target says it of the whole run
        instances=tuple(
            TargetInstance(
                **_common(view), report=_target_report(view), blocked_share=view.wait_share
            )
            for view in targets
        ),
    )


def _worker_instance(view: InstanceView) -> WorkerInstance:
    return WorkerInstance(
        **_common(view), report=_worker_report(view), starved_share=view.wait_share
    )


def _groups(
    workers: list[InstanceView],
    rings: Sequence[RingStatus],
    evaluations: Sequence[EvaluationStatus],
    trained: Mapping[str, Trained],
) -> tuple[GroupStatus, ...]:
    return tuple(
        _group(name, workers, rings, evaluations, trained[name]) for name in sorted(trained)
    )


def _group(
    name: str,
    workers: list[InstanceView],
    rings: Sequence[RingStatus],
    evaluations: Sequence[EvaluationStatus],
    trained: Trained,
) -> GroupStatus:
    pairs = [
        (view, report) for view in workers
        if (report := _worker_report(view)) is not None and report.group == name
    ]  # fmt: skip
    reports = [report for _, report in pairs]
    live = [report for view, report in pairs if _is_live(view)]
    # What a silent worker said last is no figure of this moment; after the end it is all there is.
    current = live or reports
    told = [view.told for view in workers if isinstance(view.told, WorkerReport)]
    furthest = max((r for r in told if r.group == name), key=lambda r: r.step, default=None)
    walked = [report for report in current if report.held_out]
    measured = [result for result in evaluations if result.group == name and result.is_headline]
    return GroupStatus(
        group=name,
        num_live_workers=len(live),
        num_members=max((report.num_members for report in live), default=0),
        step=furthest.step if furthest else 0,
        trained_rows=trained.rows,
        trained_tokens=trained.tokens,
        tokens_per_second=sum(_rate(view, report) for view, report in pairs if _is_live(view)),
        loss=_mean(report.loss for report in current),
        accepted_prefix_length=_mean(report.accepted_prefix_length for report in current),
        acceptance_length=measured[-1].acceptance_length if measured else None,
        held_out_acceptance_length=_mean(r.held_out[0].acceptance_length for r in walked),
        held_out_step=min((r.held_out_step for r in walked), default=None),
        best_acceptance_length=max((m.acceptance_length for m in measured), default=None),
        last_checkpoint=furthest.checkpoint if furthest else "",
        account=_sum_accounts([a for ring in rings for a in ring.groups if a.group == name]),
    )


def _rate(view: InstanceView, report: TargetReport | WorkerReport) -> float:
    """Return the rate of the last seconds; while these are too few, the one of the process's life."""
    if view.heartbeat.phase not in RATED_PHASES:
        return 0.0
    return report.tokens_per_second if view.tokens_per_second is None else view.tokens_per_second


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum_accounts(accounts: list[GroupAccount]) -> GroupAccount | None:
    if not accounts:
        return None
    counts = [account.model_dump(exclude={"group"}) for account in accounts]
    sums = {key: sum(count[key] for count in counts) for key in counts[0]}
    return GroupAccount(group=accounts[0].group, **sums)


def _evaluation(result: EvaluationResult) -> EvaluationStatus:
    group, index = _owner_of(result.checkpoint)
    return EvaluationStatus(group=group, index=index, **result.model_dump())


def _owner_of(checkpoint: str) -> tuple[str, int | None]:
    """Read group and index from `.../checkpoints/<group>/<index>/step-<number>`."""
    parts = PurePath(checkpoint).parts
    if len(parts) >= 4 and parts[-4] == "checkpoints" and parts[-2].isdecimal():
        return parts[-3], int(parts[-2])
    return "", None


def _evaluation_order(result: EvaluationStatus) -> tuple[str, int, int, str, bool]:
    return result.group, result.step, result.index or 0, result.checkpoint, result.is_headline


def _alarm(result: EvaluationStatus) -> AlarmStatus:
    return AlarmStatus(
        group=result.group, index=result.index, step=result.step,
        text=f"acceptance length {result.acceptance_length:.3f} is well below the best of its "
             f"series, {result.best_acceptance_length:.3f}, which `best` keeps",
    )  # fmt: skip


def _gpu(view: GpuView) -> GpuStatus:
    gpu = view.gpu
    return GpuStatus(
        uuid=gpu.uuid, name=gpu.name, index=gpu.index, parent=gpu.parent,
        total_bytes=gpu.total_bytes, free_bytes=view.free_bytes, is_reserved=view.is_reserved,
        holders=tuple(
            HolderStatus(service=each.service, instance=each.instance, num_bytes=each.num_bytes)
            for each in view.holders
        ),
    )  # fmt: skip


def _bottleneck(
    targets: list[InstanceView],
    workers: list[InstanceView],
    place: GpuGrant | GpuRefusal | None,
) -> BottleneckStatus:
    made, trained = _rates(targets), _rates_by_group(workers)
    slowest, starved = _least_starved(trained)
    blocked = [rate.wait_share for rate in made]
    name, reason = find_bottleneck(blocked, starved)
    if name == "drafter" and slowest:
        reason += f"; the others wait for group {slowest!r}"
    advice = advise(name, made, trained, place)
    absent = [text for view in targets if _is_live(view) for text in _absences(view)]
    if absent:
        name, advice = "drafter", None
        reason = f"{'; '.join(absent)}: start one, or set groups.<name>.detach_after_seconds"
    return BottleneckStatus(
        name=name, reason=reason, blocked_share=_mean(blocked), starved_share=_mean(starved),
        advice=advice,
    )  # fmt: skip


def _rates(views: Iterable[InstanceView]) -> list[Rate]:
    """Return what those live ones did that have run for a few seconds."""
    return [
        Rate(view.tokens_per_second, view.wait_share) for view in views
        if _is_live(view) and view.wait_share is not None and view.tokens_per_second is not None
    ]  # fmt: skip


def _rates_by_group(workers: Iterable[InstanceView]) -> dict[str, list[Rate]]:
    groups: dict[str, list[InstanceView]] = {}
    for view in workers:
        report = _worker_report(view)
        if report is not None:
            groups.setdefault(report.group, []).append(view)
    return {name: rates for name, views in groups.items() if (rates := _rates(views))}


def _least_starved(groups: Mapping[str, Sequence[Rate]]) -> tuple[str, list[float]]:
    """Return the wait shares of the group that waits least, with its name if it is one of several.

    A ring waits for the slowest group: that others starve meanwhile says nothing of the target.
    """
    shares = {name: [rate.wait_share for rate in rates] for name, rates in groups.items()}
    if not shares:
        return "", []
    slowest = min(shares, key=lambda group: sum(shares[group]) / len(shares[group]))
    return slowest if len(shares) > 1 else "", shares[slowest]


def _absences(view: InstanceView) -> list[str]:
    """Say which groups without a worker hold a target up."""
    ring = _ring_of(view)
    return [
        f"group {group.group!r} has had no worker for {group.absent_seconds:.0f} s and blocks "
        f"{view.heartbeat.instance}"
        for group in (ring.absent_groups if ring is not None else ())
        if group.is_blocking
    ]
