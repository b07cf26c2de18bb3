"""Heartbeats of imaginary services, for the tests of what listens to them."""

from typing import Any

from common.contracts.control_messages import (
    EvaluationResult,
    EvaluatorReport,
    GroupAccount,
    RingReport,
    ServiceGoodbye,
    ServiceHeartbeat,
    TargetReport,
    WorkerReport,
)
from common.contracts.sequences import ONE_RING

RUN = "demo"
_NAMES = {"target_server": "target-0", "drafter_worker": "worker-0", "evaluator": "evaluator"}


def beat(service: str, session: int = 1, number: int = 1, **fields: Any) -> ServiceHeartbeat:
    values = {
        "service": service, "instance": _NAMES[service], "session": session, "number": number,
        "run": RUN, "pid": 100, "host": "here", "phase": "running", "detail": "", "progress": number,
        "report": None,
    }  # fmt: skip
    return ServiceHeartbeat.model_validate(values | fields)


def goodbye(service: str, session: int = 1, exit_code: int = 0, reason: str = "") -> ServiceGoodbye:
    return ServiceGoodbye.model_validate({
        "service": service, "instance": _NAMES[service], "session": session,
        "exit_code": exit_code, "reason": reason,
    })  # fmt: skip


def target_report(**fields: Any) -> TargetReport:
    values = {
        "target": "tiny", "total_rows": 64, "captured_tokens": 4096, "capture_seconds": 2.5,
        "blocked_seconds": 1.25, "tokens_per_second": 1638.4, "skipped_samples": {"too_long": 3},
        "captured_tokens_by_tag": {"chat": 4000, "code": 96},
        "checks": {"isolation": "ok"}, "ring": ring_report(),
    }  # fmt: skip
    return TargetReport.model_validate(values | fields)


def ring_report(**fields: Any) -> RingReport:
    account = GroupAccount(
        group="main", published=11, released=8, poison=0, skipped=0, in_ring=3, consumed=7,
        committed=5, settled_before=0, open=4, requeued=1, recaptured=0, poison_late=0,
    )  # fmt: skip
    values = {
        "ring_epoch": (1 << 63) + 12345, "shard": ONE_RING, "transport": "host", "transport_reason": "no GPU here",
        "num_bytes": 1 << 20, "slots": {"free": 5, "published": 3}, "deliveries": {"ready": 3},
        "oldest_lease_seconds": 0.5, "high_watermark": 8, "low_watermark": 7, "is_blocked": False,
        "groups": (account,), "absent_groups": (), "stale_calls": {"release": 2},
        "refused_messages": {"malformed": 4}, "reclaimed": {"expired": 1},
    }  # fmt: skip
    return RingReport.model_validate(values | fields)


def worker_report(**fields: Any) -> WorkerReport:
    values = {
        "group": "main", "index": 0, "device": "cpu", "gpu_uuid": "", "step": 7, "trained_rows": 7,
        "trained_tokens": 3584, "tokens_per_second": 512.0, "loss": 3.25,
        "acceptance_rate_at": (0.5, 0.25), "accepted_prefix_length": 0.75, "learning_rate": 1e-3,
        "gradient_norm": 1.5, "starved_seconds": 0.125, "sync_seconds": 0.5, "num_members": 2, "step_seconds": 0.2,
        "last_step_age_seconds": 0.1, "seconds_to_first_step": 21.5, "compile_seconds": 9.5,
        "compile_wait_seconds": 4.5, "compile_cache_hits": 3, "compile_cache_misses": 1, "recompiles": 0, "graph_replays": 14, "dropped_blocks": 3, "held_out_step": 4,
        "held_out": ({"tag": "", "context": "", "num_answers": 5, "acceptance_length": 1.75, "acceptance_rate_at": (0.5, 0.25)}, {"tag": "chat", "context": "under 256", "num_answers": 5, "acceptance_length": 1.75, "acceptance_rate_at": (0.5, 0.25)}),
        "refused_messages": {"malformed": 2}, "memory_bytes": 4096,
        "checkpoint": "runs/demo/checkpoints/main/0/step-000005",
    }  # fmt: skip
    return WorkerReport.model_validate(values | fields)


def evaluator_report(**fields: Any) -> EvaluatorReport:
    values = {"num_done": 1, "num_total": 2, "is_following": False, "results": (evaluation(),)}
    return EvaluatorReport.model_validate(values | fields)


def evaluation(**fields: Any) -> EvaluationResult:
    values = {
        "checkpoint": "runs/demo/checkpoints/main/0/step-000005", "step": 5, "num_prompts": 8,
        "acceptance_length": 2.5, "replay_acceptance_length": 2.4375,
        "acceptance_rate_at": (0.75, 0.5), "speedup": 1.75, "num_float_ties": 1,
        "num_mismatches": 0,
    }  # fmt: skip
    return EvaluationResult.model_validate(values | fields)
