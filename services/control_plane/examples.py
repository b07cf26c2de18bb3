"""Example answers for the routes' documentation, made as real ones are made: from heartbeats."""

from typing import Any

from common.contracts.control_messages import (
    EvaluationResult,
    GroupAccount,
    Phase,
    Report,
    RingReport,
    ServiceHeartbeat,
    ServiceKind,
    TargetReport,
    WorkerReport,
)
from common.contracts.placement_messages import Gpu, GpuClaim
from common.contracts.sequences import ONE_RING
from services.control_plane.changes import Event
from services.control_plane.history import History, make_sample
from services.control_plane.registry import Registry
from services.control_plane.status import Status
from services.control_plane.view import build_status

_RUN, _DIRECTORY = "qwen3-4b", "runs/qwen3-4b-20260101-120000"
_GPUS = tuple(f"GPU-8f6a2c1e-0000-4000-8000-{index:012x}" for index in range(2))
_GIB = 1 << 30
_CHECKPOINT = f"{_DIRECTORY}/checkpoints/main/0/step-000200"

READY = {"is_ready": True, "reason": ""}
UNREADY = {
    "is_ready": False,
    "reason": "no drafter worker runs: main-0 is ok in phase compiling",
}
METRICS = """# HELP drafter_steps_total Optimizer updates.
# TYPE drafter_steps_total counter
drafter_steps_total{group="main",index="0",instance="main-0"} 212.0
"""
EVENT = 'id: 1\nevent: status\ndata: {"schema_version": 1, "...": "as /status"}\n\n'


def example_status() -> dict[str, Any]:
    """Return /status of a run with one target, one worker and one measured checkpoint."""
    return _status().model_dump(mode="json")


def example_history() -> dict[str, Any]:
    """Return /history of that run, with one sample and one event."""
    sample = make_sample(_status())
    event = Event(time=sample.time, kind="join", instance="main-0", text="drafter_worker, pid 4002")
    return History(samples=(sample,), events=(event,)).model_dump(mode="json")


def _status() -> Status:
    registry = Registry(_RUN, 0.5)
    for beat in example_heartbeats():
        registry.take_heartbeat(beat)
    registry.add_evaluations([_evaluation()])
    status = build_status(registry.snapshot(), _RUN, _DIRECTORY)
    return status.model_copy(update={"time": 1767268800.0})


def example_heartbeats(num_workers: int = 1) -> list[ServiceHeartbeat]:
    """Return first heartbeats of a target and of workers of one group."""
    workers = [
        _beat("drafter_worker", f"main-{index}", 2 + index, "step 212", 212, _worker(index))
        for index in range(num_workers)
    ]
    return [_beat("target_server", "target-0", 1, "row 215", 215, _target()), *workers]


def _claim(held: str) -> GpuClaim:
    gpus = tuple(
        Gpu(
            uuid=uuid,
            name="NVIDIA H200",
            index=index,
            total_bytes=140 * _GIB,
            free_bytes=139 * _GIB,
        )
        for index, uuid in enumerate(_GPUS)
    )
    return GpuClaim(gpus=gpus, num_bytes=12 * _GIB, held=held)


def _beat(
    service: ServiceKind, instance: str, session: int, detail: str, progress: int, report: Report
) -> ServiceHeartbeat:
    phase: Phase = "running"
    return ServiceHeartbeat(
        service=service, instance=instance, session=session, number=1, run=_RUN, pid=4000 + session,
        host="trainer", phase=phase, detail=detail, progress=progress, report=report,
        claim=_claim(_GPUS[service == "drafter_worker"]),
    )  # fmt: skip


def _target() -> TargetReport:
    account = GroupAccount(
        group="main", published=215, released=213, poison=0, skipped=0, in_ring=2, consumed=212,
        committed=200, settled_before=0, open=15, requeued=0, recaptured=0, poison_late=0,
    )  # fmt: skip
    ring = RingReport(
        ring_epoch=0x1F3A9C5E7B2D4860, shard=ONE_RING, transport="cuda_ipc",
        transport_reason="target and workers are on one GPU", num_bytes=671088640,
        slots={"free": 6, "published": 1, "leased": 1}, deliveries={"ready": 1, "leased": 1},
        oldest_lease_seconds=0.01, high_watermark=8, low_watermark=7, is_blocked=False,
        groups=(account,), absent_groups=(), stale_calls={}, refused_messages={}, reclaimed={},
    )  # fmt: skip
    return TargetReport(
        target="/models/Qwen3-4B", total_rows=4000, captured_tokens=440320, capture_seconds=18.2,
        blocked_seconds=3.1, tokens_per_second=20480.0, skipped_samples={"too_long": 3},
        captured_tokens_by_tag={"chat": 440320}, checks={"features": "ok"}, ring=ring,
    )  # fmt: skip


def _worker(index: int) -> WorkerReport:
    return WorkerReport(
        group="main", index=index, device="cuda", gpu_uuid=_GPUS[1], step=212, trained_rows=212,
        trained_tokens=434176, tokens_per_second=20100.0, loss=2.71,
        acceptance_rate_at=(0.71, 0.52), accepted_prefix_length=1.4, learning_rate=6e-4,
        gradient_norm=0.8, starved_seconds=0.6, sync_seconds=0.0, num_members=0, step_seconds=0.1,
        last_step_age_seconds=0.05, seconds_to_first_step=41.0, compile_seconds=22.0,
        compile_wait_seconds=0.0, compile_cache_hits=0, compile_cache_misses=9, recompiles=0,
        graph_replays=212, memory_bytes=5368709120, held_out=(), held_out_step=0, dropped_blocks=0,
        refused_messages={}, checkpoint=_CHECKPOINT,
    )  # fmt: skip


def _evaluation() -> EvaluationResult:
    return EvaluationResult(
        checkpoint=_CHECKPOINT, step=200, num_prompts=16, acceptance_length=2.4,
        replay_acceptance_length=2.4, acceptance_rate_at=(0.7, 0.5), speedup=1.6, num_float_ties=0,
        num_mismatches=0, best_acceptance_length=2.4,
    )  # fmt: skip
