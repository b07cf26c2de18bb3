"""What `GET /status` answers: the models of the responses.

`schema_version` rises when a field goes away or changes its meaning. Numbers of 64 bits are
hexadecimal text, since JavaScript would round them.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from common.contracts.control_messages import (
    AbsentGroup,
    EvaluationResult,
    GroupAccount,
    Phase,
    ServiceKind,
    TargetReport,
    WorkerReport,
)
from common.contracts.sequences import Shard
from services.control_plane.health import BottleneckName, Condition

RunState = Literal[
    "waiting", "starting", "running", "paused", "draining", "evaluating", "done", "failed"
]


SCHEMA_VERSION: Literal[1] = 1


class Model(BaseModel):
    """A frozen part of a response."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class RunStatus(Model):
    """The run as a whole."""

    name: str
    directory: str
    state: RunState
    """`starting` until rows are trained on, and again while workers wait for a target that starts;
    `not_ready_reason` says what is waited for."""
    command: str
    """The last command for the whole run, or empty."""
    uptime_seconds: float
    """Of this control plane."""


class TransportStatus(Model):
    """How rows travel, and why so."""

    chosen: str
    reason: str


class InstanceStatus(Model):
    """One session of a service."""

    service: ServiceKind
    instance: str
    session: str
    pid: int
    host: str
    phase: Phase
    detail: str
    progress: int
    condition: Condition
    heartbeat_age_seconds: float
    progress_age_seconds: float
    exit_code: int | None
    exit_reason: str


class TargetInstance(InstanceStatus):
    """A target server; its ring is under `rings`."""

    report: TargetReport | None
    blocked_share: float | None
    """Share of the last seconds spent waiting on a full ring."""


class WorkerInstance(InstanceStatus):
    """A drafter worker."""

    report: WorkerReport | None
    starved_share: float | None
    """Share of the last seconds spent waiting on an empty ring."""


class TargetStatus(Model):
    """All target servers together."""

    model: str
    tokens_per_second: float
    """Over the last seconds, of those that live; 0 while they are paused."""
    captured_tokens: int
    blocked_seconds: float
    total_rows: int | None
    instances: tuple[TargetInstance, ...]


class RingStatus(Model):
    """One ring, by its owner's last heartbeat."""

    instance: str
    ring_epoch: str
    shard: Shard
    """Which rows of the run it carries."""
    transport: str
    transport_reason: str
    num_bytes: int
    slots: dict[str, int]
    deliveries: dict[str, int]
    oldest_lease_seconds: float
    high_watermark: int
    low_watermark: int
    is_blocked: bool
    """The target gets no slot at this moment."""
    groups: tuple[GroupAccount, ...]
    absent_groups: tuple[AbsentGroup, ...]
    """Groups without a worker that rows wait for, or are skipped for."""
    stale_calls: dict[str, int]
    refused_messages: dict[str, int]
    reclaimed: dict[str, int]


class GroupStatus(Model):
    """One drafter under training."""

    group: str
    num_live_workers: int
    num_members: int
    """Of them, who came to the last meeting of the group's sync; 0 without one."""
    step: int
    """Of the worker that is furthest; of one that starts in another's place, the other's until it reports."""
    trained_rows: int
    """Never less than before: what a killed worker's successor trains again counts once."""
    trained_tokens: int
    """The same of tokens."""
    tokens_per_second: float
    """Over the last seconds, of those that live; 0 while they are paused."""
    loss: float | None
    accepted_prefix_length: float | None
    acceptance_length: float | None
    """Of its last evaluated checkpoint, by decoding."""
    held_out_acceptance_length: float | None
    """Of its workers' last measures, by replay walk."""
    held_out_step: int | None
    """Step of the earliest of these."""
    best_acceptance_length: float | None
    """Of all its evaluated checkpoints."""
    last_checkpoint: str
    account: GroupAccount | None
    """Its rows over all rings."""


class EvaluationStatus(EvaluationResult):
    """A measured checkpoint; group and index are empty where its path does not name them."""

    group: str
    index: int | None


class AlarmStatus(Model):
    """A checkpoint that is worse than an earlier one of its series."""

    group: str
    index: int | None
    step: int
    text: str


class OverdueStatus(Model):
    """A service that is silent or stalled, and who waits for it."""

    service: ServiceKind
    instance: str
    pid: int
    host: str
    condition: Literal["silent", "stalled"]
    phase: Phase
    age_seconds: float
    """Since its last heartbeat where it is silent, since its last progress where it is stalled."""
    last_step: int
    """Of a worker its last optimizer step, of a target its rows, of an evaluator its passes."""
    has_begun: bool
    """Its first step or row is made: it has loaded and compiled what it needs."""
    waiting: tuple[str, ...]
    """Live peers that have nothing to do meanwhile."""
    text: str
    """All of it in one line."""


class HolderStatus(Model):
    """Who has a lease on a GPU."""

    service: ServiceKind
    instance: str
    num_bytes: int
    """What it takes, by estimate."""


class GpuStatus(Model):
    """A GPU, or a MIG device of one, that a process of the run may take."""

    uuid: str
    name: str
    index: int
    """Of the GPU, as nvidia-smi counts."""
    parent: str
    """Of a MIG device the UUID of its GPU, else empty."""
    total_bytes: int
    free_bytes: int
    """As the last process found that asked for a place, less what its holders are to take."""
    is_reserved: bool
    """Only targets take it."""
    holders: tuple[HolderStatus, ...]


class AdviceStatus(Model):
    """What another worker or target would give, in tokens a second of the group that is slowest."""

    group: str
    tokens_per_second: float
    """Over the last seconds, as all figures here."""
    target_capacity: float
    """What the targets would make if they never waited."""
    drafter_capacity: float
    """What the group would train if it never waited."""
    with_another_worker: float
    with_another_target: float
    worker_place: str
    """UUID of the GPU that the worker would get; empty without GPUs, or where none has room."""
    text: str
    """All of it for people."""


class BottleneckStatus(Model):
    """Which side holds the run back."""

    name: BottleneckName
    reason: str
    blocked_share: float | None
    starved_share: float | None
    advice: AdviceStatus | None
    """None until both sides have run for a few seconds, or while a group has no worker."""


class ErrorStatus(Model):
    """An error that a service reported."""

    instance: str
    text: str
    age_seconds: float


class Status(Model):
    """Everything the control plane knows."""

    schema_version: Literal[1] = SCHEMA_VERSION
    time: float
    run: RunStatus
    is_ready: bool
    not_ready_reason: str
    transport: TransportStatus | None
    rings: tuple[RingStatus, ...]
    target: TargetStatus
    workers: tuple[WorkerInstance, ...]
    groups: tuple[GroupStatus, ...]
    evaluators: tuple[InstanceStatus, ...]
    evaluations: tuple[EvaluationStatus, ...]
    alarms: tuple[AlarmStatus, ...]
    overdue: tuple[OverdueStatus, ...]
    gpus: tuple[GpuStatus, ...]
    """By what live processes see; empty on the CPU."""
    bottleneck: BottleneckStatus
    errors: tuple[ErrorStatus, ...]
    refused_messages: dict[str, int]


class Health(Model):
    """Answer of /healthz."""

    status: Literal["ok"] = "ok"


class Readiness(Model):
    """Answer of /readyz."""

    is_ready: bool
    reason: str


class CommandAccepted(Model):
    """Answer to a command; it is carried out with the next heartbeats."""

    name: str
    number: int
    num_recipients: int
