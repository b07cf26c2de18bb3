"""Names the services that are silent or stalled, with pid and last step, and who waits for them.

Pure: of the views of one snapshot.
"""

from common.contracts.control_messages import TargetReport, WorkerReport
from services.control_plane.health import waits_for_peers
from services.control_plane.registry import InstanceView
from services.control_plane.status import OverdueStatus


def find_overdue(
    targets: list[InstanceView], workers: list[InstanceView], evaluators: list[InstanceView]
) -> tuple[OverdueStatus, ...]:
    """Return who is overdue: targets with the workers that starve, workers with blocked targets."""
    starving = [_describe(view) for view in workers if _waits(view)]
    blocked = [_describe(view) for view in targets if _waits(view)]
    judged = (
        *(_judge(view, starving) for view in targets),
        *(_judge(view, blocked) for view in workers),
        *(_judge(view, []) for view in evaluators),
    )
    return tuple(found for found in judged if found is not None)


def _judge(view: InstanceView, peers: list[str]) -> OverdueStatus | None:
    beat = view.heartbeat
    if view.condition == "silent":
        age, what = view.age_seconds, "no heartbeat"
    elif view.condition == "stalled":
        age, what = view.progress_age_seconds, f"no progress in phase {beat.phase}"
    else:
        return None
    text = f"{_describe(view)} is {view.condition}: {what} for {age:.0f} s"
    if peers:
        text += f"; {', '.join(peers)} {'waits' if len(peers) == 1 else 'wait'} for it"
    return OverdueStatus(
        service=beat.service, instance=beat.instance, pid=beat.pid, host=beat.host,
        condition=view.condition, phase=beat.phase, age_seconds=age,
        last_step=_last_step(view)[1], has_begun=_has_begun(view), waiting=tuple(peers), text=text,
    )  # fmt: skip


def _has_begun(view: InstanceView) -> bool:
    report = view.heartbeat.report
    if isinstance(report, WorkerReport):  # its progress goes on from the one that it resumes
        return report.seconds_to_first_step is not None
    return view.heartbeat.progress > 0


def _waits(view: InstanceView) -> bool:
    """Whether a live service has nothing to do but to wait for the other side."""
    if view.condition not in ("ok", "stalled"):
        return False
    report = view.heartbeat.report
    if isinstance(report, TargetReport) and report.ring is not None and report.ring.is_blocked:
        return True
    return waits_for_peers(view.heartbeat.phase, view.wait_share)


def _describe(view: InstanceView) -> str:
    unit, number = _last_step(view)
    return f"{view.heartbeat.instance} (pid {view.heartbeat.pid}, {unit} {number})"


def _last_step(view: InstanceView) -> tuple[str, int]:
    report, progress = view.heartbeat.report, view.heartbeat.progress
    if isinstance(report, WorkerReport):
        return "step", report.step
    return ("row" if view.heartbeat.service == "target_server" else "unit", progress)
