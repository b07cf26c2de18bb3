"""Messages between every service and the control plane, over `<run_dir>/control.sock`.

Services register, then send heartbeats that carry a whole report each; commands ride in the
replies. Reports are absolute, so the control plane rebuilds its state from heartbeats after a
restart, and a lost message costs one interval.
"""

from typing import Annotated, Literal

from pydantic import Field

from common.contracts.codec import Decoder
from common.contracts.placement_messages import GpuClaim, GpuGrant, GpuRefusal
from common.contracts.record import Record
from common.contracts.ring_messages import U64, Count, Name
from common.contracts.sequences import Shard

ServiceKind = Literal["target_server", "drafter_worker", "evaluator"]
Phase = Literal[
    "starting",
    "loading",
    "compiling",
    "running",
    "waiting",
    "measuring",
    "saving",
    "draining",
    "paused",
    "done",
    "failed",
]


class GroupAccount(Record):
    """One group's accounts at a ring's owner (rule R6):
    published = released + poison + skipped + in the ring."""

    group: Name
    published: Count
    released: Count
    poison: Count
    skipped: Count
    in_ring: Count
    consumed: Count
    committed: Count
    settled_before: Count
    """Sequences that the owner's predecessors published and that are settled; no other count has them."""
    open: Count
    """Sequences published and not settled: in the ring, on their way, or not committed yet."""
    requeued: Count
    recaptured: Count
    poison_late: Count


class AbsentGroup(Record):
    """A group without a worker, while rows in the ring wait for it or are skipped for it."""

    group: Name
    absent_seconds: float
    num_waiting: Count
    """Rows in the ring that wait for it."""
    is_blocking: bool
    """The target waits too: the ring is full, and these rows are part of why."""
    is_detached: bool
    """Rows are skipped for it until a worker comes."""


class RingReport(Record):
    """The state of one ring, by its owner."""

    ring_epoch: U64
    shard: Shard
    """Which rows of the run it carries."""
    transport: Literal["host", "cuda_ipc", "memory"]
    transport_reason: str
    num_bytes: Count
    slots: dict[str, int]
    """Slots by state."""
    deliveries: dict[str, int]
    """Deliveries by state, over all groups."""
    oldest_lease_seconds: float
    high_watermark: Count
    """Slots in use at which the target waits."""
    low_watermark: Count
    """Published slots down to which it waits then."""
    is_blocked: bool
    """The target gets no slot at this moment."""
    groups: tuple[GroupAccount, ...]
    absent_groups: tuple[AbsentGroup, ...]
    """Groups without a worker that rows wait for, or are skipped for."""
    stale_calls: dict[str, int]
    """Late, foreign or repeated calls that did nothing, by call."""
    refused_messages: dict[str, int]
    """Messages dropped by reason."""
    reclaimed: dict[str, int]
    """Leases taken back, by reason."""


class TargetReport(Record):
    """What a target server says of itself."""

    kind: Literal["target"] = "target"
    target: str
    total_rows: Count | None
    """Rows of the whole run, over all targets, where the data has been counted, else None."""
    captured_tokens: Count
    capture_seconds: float
    blocked_seconds: float
    tokens_per_second: float
    skipped_samples: dict[str, int]
    """Samples that were not used, by reason."""
    captured_tokens_by_tag: dict[str, int]
    """Tokens of documents that were run through the target, by the tag of their source."""
    checks: dict[str, str]
    """Start-up checks and their results."""
    ring: RingReport | None


class HeldOutFigures(Record):
    """Acceptance on text that the target wrote greedily, by the replay walk."""

    tag: str
    """Tag of the prompts; empty for all of them."""
    context: str
    """Tokens before the answer, as in "under 1024"; empty for all."""
    num_answers: Count
    acceptance_length: float
    """Tokens a pass of the target, the bonus included."""
    acceptance_rate_at: tuple[float, ...]
    """Teacher-forced accuracy at each draft position, over every anchor of the answers."""


class WorkerReport(Record):
    """What a drafter worker says of itself."""

    kind: Literal["worker"] = "worker"
    group: Name
    index: Count
    device: str
    gpu_uuid: str
    step: Count
    trained_rows: Count
    trained_tokens: Count
    tokens_per_second: float
    loss: float | None
    acceptance_rate_at: tuple[float, ...]
    """Teacher-forced accuracy at each draft position, first to last."""
    accepted_prefix_length: float | None
    learning_rate: float
    gradient_norm: float | None
    starved_seconds: float
    sync_seconds: float
    """Spent in meetings with the other members of the group, waiting for them included."""
    num_members: Count
    """Who came to its last meeting, itself included; 0 where its group has no sync, and before the first."""
    step_seconds: float
    """Median of the last steps, without waits for rows; on a GPU by its clock."""
    last_step_age_seconds: float | None
    seconds_to_first_step: float | None
    """From the process's start to the end of its first optimizer step."""
    compile_seconds: float
    """Of these, compiling and capturing."""
    compile_wait_seconds: float
    """Of these, waiting for a worker that compiled the same."""
    compile_cache_hits: Count
    """Graphs that the cache of compiled code had."""
    compile_cache_misses: Count
    recompiles: Count
    graph_replays: Count
    memory_bytes: Count
    held_out: tuple[HeldOutFigures, ...]
    """Of all held-out answers first, then by tag and context; empty where the run has none."""
    held_out_step: Count
    """Step at which they were measured."""
    dropped_blocks: Count
    """Blocks that the head had no room for, so far."""
    refused_messages: dict[str, int]
    """Messages of its rings' owners that it dropped, by reason."""
    checkpoint: str
    """Path of the last checkpoint, or empty."""


class EvaluationFigures(Record):
    """Acceptance and speed over some of an evaluation's target passes."""

    num_passes: Count
    acceptance_length: float
    """Tokens a target pass, by decoding, the target's own included."""
    replay_acceptance_length: float | None
    """The same by replay walk, which is greedy; null where tokens were sampled."""
    speedup: float
    """Over decoding without a drafter; 0 where nothing of it was measured."""


class EvaluationResult(Record):
    """Acceptance of one checkpoint, measured by decoding with the target."""

    checkpoint: str
    step: Count
    arm: str = "main"
    """Which way the prompts were asked."""
    temperature: float = 0.0
    is_headline: bool = True
    """Whether it is of the run's first arm and temperature, which `best` follows."""
    num_prompts: Count
    acceptance_length: float
    replay_acceptance_length: float | None
    acceptance_rate_at: tuple[float, ...]
    speedup: float
    num_float_ties: Count
    num_mismatches: Count
    by_tag: dict[str, EvaluationFigures] = {}
    """By the tag of the prompts."""
    by_context: dict[str, EvaluationFigures] = {}
    """By the tokens in front of the block, such as "512-2047"."""
    best_acceptance_length: float = 0.0
    """The best of its series so far, its own included."""
    has_regressed: bool = False
    """Whether it is below that by more than evaluation.alarm_share."""


class EvaluatorReport(Record):
    """What an evaluator says of itself."""

    kind: Literal["evaluator"] = "evaluator"
    num_done: Count
    num_total: Count
    """Answers to decode, as far as is known: a followed run may bring more checkpoints."""
    is_following: bool
    """Whether it waits for the checkpoints of the run, and so can be asked for the newest ones."""
    results: tuple[EvaluationResult, ...]
    """The last ones; all of them are in the run's evaluations/."""


Report = Annotated[TargetReport | WorkerReport | EvaluatorReport, Field(discriminator="kind")]


class ServiceHeartbeat(Record):
    """One service instance's whole state, with a rising number; the first one registers it."""

    service: ServiceKind
    instance: Name
    session: U64
    number: Count
    run: Name
    pid: Count
    host: str
    phase: Phase
    detail: str
    """One line for people: what it does, or why it failed."""
    progress: Count
    """Rises with each unit of work; the watchdog looks at this, not at liveness."""
    report: Report | None
    errors: tuple[str, ...] = ()
    claim: GpuClaim | None = None
    """Its place on a GPU; None on the CPU."""


class ServiceGoodbye(Record):
    """The instance ends on purpose; `exit_code` 0 is a clean end."""

    service: ServiceKind
    instance: Name
    session: U64
    exit_code: int
    reason: str


CommandName = Literal["pause", "resume", "drain", "stop", "checkpoint", "evaluate", "stacks"]


class Command(Record):
    """Something the service is asked to do; in every reply, and acted on once by its number."""

    name: CommandName
    number: Count


class ServiceReply(Record):
    """Answer to a heartbeat."""

    session: U64
    number: Count
    heartbeat_seconds: float
    commands: tuple[Command, ...]
    place: GpuGrant | GpuRefusal | None = None
    """Answer to a claim that holds nothing."""


CONTROL_PLANE_DECODER = Decoder(ServiceHeartbeat, ServiceGoodbye)
SERVICE_DECODER = Decoder(ServiceReply)
