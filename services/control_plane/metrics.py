"""Prometheus metrics of a run, made from its status at each scrape.

Nothing is counted here: counters are the services' own absolute figures, so a scrape after a
restart of the control plane goes on where the last one ended.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.control_plane.status import InstanceStatus, Status

_WORKER = ("instance", "group", "index")
# (name, attribute of WorkerReport, help)
_WORKER_COUNTERS = (
    ("drafter_steps", "step", "Optimizer updates."),
    ("drafter_trained_rows", "trained_rows", "Rows trained on."),
    ("drafter_trained_tokens", "trained_tokens", "Tokens trained on."),
    ("drafter_starved_seconds", "starved_seconds", "Seconds without work for want of a row."),
    ("drafter_sync_seconds", "sync_seconds", "Seconds spent in meetings of a synced group."),
    ("drafter_compile_cache_hits", "compile_cache_hits", "Graphs found compiled."),
    ("drafter_compile_cache_misses", "compile_cache_misses", "Graphs not found compiled."),
    ("drafter_recompiles", "recompiles", "Compilations after warm-up."),
    ("drafter_dropped_blocks", "dropped_blocks", "Blocks that found no room in drafter.head_rows."),
    ("drafter_graph_replays", "graph_replays", "Replays of captured CUDA graphs."),
)
_WORKER_GAUGES = (
    ("drafter_tokens_per_second", "tokens_per_second", "Tokens trained on a second."),
    ("drafter_loss", "loss", "Training loss."),
    ("drafter_accepted_prefix_length", "accepted_prefix_length",
     "Teacher-forced length of the correct prefix, bonus excluded."),
    ("drafter_learning_rate", "learning_rate", "Learning rate."),
    ("drafter_gradient_norm", "gradient_norm", "Norm of the gradient before clipping."),
    ("drafter_step_seconds", "step_seconds", "Median time of the last steps."),
    ("drafter_seconds_to_first_step", "seconds_to_first_step",
     "From the process's start to the end of its first step."),
    ("drafter_compile_seconds", "compile_seconds", "Of these, compiling and capturing."),
    ("drafter_compile_wait_seconds", "compile_wait_seconds",
     "Of these, waiting for a worker that compiled the same."),
    ("drafter_group_members", "num_members", "Members at the last meeting of a synced group."),
    ("drafter_memory_bytes", "memory_bytes", "Allocated memory."),
)  # fmt: skip
_TARGET_COUNTERS = (
    ("target_captured_tokens", "captured_tokens", "Tokens run through the target."),
    ("target_capture_seconds", "capture_seconds", "Seconds spent running the target."),
    ("target_blocked_seconds", "blocked_seconds", "Seconds spent waiting on a full ring."),
)
_ROW_ENDS = (
    "published", "released", "poison", "skipped", "consumed", "committed", "requeued",
    "recaptured", "poison_late",
)  # fmt: skip


def render(status: Status) -> bytes:
    """Return the status as Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(lambda: status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Yields every metric from one status."""

    def __init__(self, read_status: Callable[[], Status]) -> None:
        self._read_status = read_status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the status at this moment."""
        status = self._read_status()
        yield from _instances(status)
        yield from _targets(status)
        yield from _workers(status)
        yield from _rings(status)
        yield from _rows(status)
        yield from _evaluations(status)
        yield from _places(status)
        refused = _counter("control_plane_refused_messages", "Messages dropped.", ("reason",))
        for reason, count in status.refused_messages.items():
            refused.add_metric((reason,), count)
        yield refused


def _counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _instances(status: Status) -> Iterator[Metric]:
    labels = ("service", "instance")
    up = _gauge("service_up", "1 while heartbeats come.", labels)
    stalled = _gauge("service_stalled", "1 while progress is overdue.", labels)
    age = _gauge("service_heartbeat_age_seconds", "Since its last heartbeat.", labels)
    views: tuple[InstanceStatus, ...] = (
        *status.target.instances, *status.workers, *status.evaluators
    )  # fmt: skip
    for name, view in {(view.service, view.instance): view for view in views}.items():
        up.add_metric(name, view.condition in ("ok", "stalled"))
        stalled.add_metric(name, view.condition == "stalled")
        age.add_metric(name, view.heartbeat_age_seconds)
    yield from (up, stalled, age)


def _places(status: Status) -> Iterator[Metric]:
    leases = _gauge("control_plane_gpu_leases", "Processes with a lease.", ("gpu", "service"))
    free = _gauge("control_plane_gpu_free_bytes", "Memory for another process.", ("gpu",))
    for gpu in status.gpus:
        free.add_metric((gpu.uuid,), gpu.free_bytes)
        for service, count in Counter(holder.service for holder in gpu.holders).items():
            leases.add_metric((gpu.uuid, service), count)
    advised = _gauge(
        "control_plane_advised_tokens_per_second",
        "Tokens a second of the slowest group by estimate, with one more.", ("add",),
    )  # fmt: skip
    if (advice := status.bottleneck.advice) is not None:
        advised.add_metric(("worker",), advice.with_another_worker)
        advised.add_metric(("target",), advice.with_another_target)
    yield from (leases, free, advised)


def _targets(status: Status) -> Iterator[Metric]:
    reports = {view.instance: view.report for view in status.target.instances if view.report}
    for name, attribute, text in _TARGET_COUNTERS:
        counter = _counter(name, text, ("instance",))
        for instance, report in reports.items():
            counter.add_metric((instance,), getattr(report, attribute))
        yield counter
    rate = _gauge(
        "target_tokens_per_second", "Tokens run through the target a second.", ("instance",)
    )
    skipped = _counter("target_skipped_samples", "Samples not used.", ("instance", "reason"))
    tagged = _counter(
        "target_captured_tokens_by_tag", "Tokens run through the target.", ("instance", "tag")
    )
    for instance, report in reports.items():
        rate.add_metric((instance,), report.tokens_per_second)
        for tag, count in report.captured_tokens_by_tag.items():
            tagged.add_metric((instance, tag), count)
        for reason, count in report.skipped_samples.items():
            skipped.add_metric((instance, reason), count)
    yield from (rate, skipped, tagged)


def _workers(status: Status) -> Iterator[Metric]:
    # By labels, since two processes under one name must not make one sample twice.
    reports = {
        (view.instance, view.report.group, str(view.report.index)): view.report
        for view in status.workers if view.report is not None
    }  # fmt: skip
    families: list[tuple[CounterMetricFamily | GaugeMetricFamily, str]] = [
        *((_counter(name, text, _WORKER), field) for name, field, text in _WORKER_COUNTERS),
        *((_gauge(name, text, _WORKER), field) for name, field, text in _WORKER_GAUGES),
    ]
    for family, field in families:
        for labels, report in reports.items():
            value = getattr(report, field)
            if value is not None:
                family.add_metric(labels, value)
        yield family
    last = _gauge("drafter_last_step_timestamp_seconds", "When the last step ended.", _WORKER)
    rate = _gauge("drafter_acceptance_rate_at", "Teacher-forced accuracy.", (*_WORKER, "position"))
    held_out = _gauge(
        "drafter_replay_acceptance_length", "On held-out answers; without tag and context, on all.",
        (*_WORKER, "tag", "context"),
    )  # fmt: skip
    refused = _counter("drafter_refused_messages", "Messages dropped.", (*_WORKER, "reason"))
    for labels, report in reports.items():
        for reason, count in report.refused_messages.items():
            refused.add_metric((*labels, reason), count)
        if report.last_step_age_seconds is not None:
            last.add_metric(labels, status.time - report.last_step_age_seconds)
        for position, value in enumerate(report.acceptance_rate_at):
            rate.add_metric((*labels, str(position)), value)
        for figures in report.held_out:
            held_out.add_metric((*labels, figures.tag, figures.context), figures.acceptance_length)
    yield from (last, rate, held_out, refused)


def _rings(status: Status) -> Iterator[Metric]:
    by_state = ("instance", "state")
    slots = _gauge("ring_slots", "Slots by state.", by_state)
    deliveries = _gauge("ring_deliveries", "Deliveries by state, over all groups.", by_state)
    size = _gauge("ring_bytes", "Size of the segment.", ("instance",))
    lease = _gauge("ring_lease_age_seconds", "Age of the oldest lease.", ("instance",))
    epoch = _gauge("ring_epoch", "Identity of the owner's life, rounded.", ("instance",))
    blocked = _gauge("ring_blocked", "1 while the target gets no slot.", ("instance",))
    absent = _gauge(
        "ring_absent_group_seconds", "Since the group has had no worker, while rows are for it.",
        ("instance", "group", "state"),
    )  # fmt: skip
    transport = _gauge(
        "ring_transport_info", "Where slots live.", ("instance", "transport", "reason")
    )
    for ring in status.rings:
        name = (ring.instance,)
        for state, count in ring.slots.items():
            slots.add_metric((*name, state), count)
        for state, count in ring.deliveries.items():
            deliveries.add_metric((*name, state), count)
        size.add_metric(name, ring.num_bytes)
        lease.add_metric(name, ring.oldest_lease_seconds)
        epoch.add_metric(name, int(ring.ring_epoch, 16))
        blocked.add_metric(name, ring.is_blocked)
        for group in ring.absent_groups:
            state = "detached" if group.is_detached else "waiting"
            absent.add_metric((*name, group.group, state), group.absent_seconds)
        transport.add_metric((*name, ring.transport, ring.transport_reason), 1)
    yield from (slots, deliveries, size, lease, epoch, blocked, absent, transport)


def _rows(status: Status) -> Iterator[Metric]:
    published = _counter("ring_published", "Rows published.", ("instance", "group"))
    ends = _counter(
        "ring_rows", "Rows of a group by what became of them.", ("instance", "group", "end")
    )
    unsettled = _gauge("ring_open_rows", "Rows published and not settled.", ("instance", "group"))
    reclaimed = _counter("ring_reclaimed", "Leases taken back.", ("instance", "reason"))
    stale = _counter("ring_stale_calls", "Late, foreign or repeated calls.", ("instance", "call"))
    refused = _counter("ring_refused_messages", "Messages dropped.", ("instance", "reason"))
    for ring in status.rings:
        for account in ring.groups:
            published.add_metric((ring.instance, account.group), account.published)
            unsettled.add_metric((ring.instance, account.group), account.open)
            for end in _ROW_ENDS:
                ends.add_metric((ring.instance, account.group, end), getattr(account, end))
        for family, counts in (
            (reclaimed, ring.reclaimed), (stale, ring.stale_calls), (refused, ring.refused_messages)
        ):  # fmt: skip
            for label, count in counts.items():
                family.add_metric((ring.instance, label), count)
    yield from (published, ends, unsettled, reclaimed, stale, refused)


def _evaluations(status: Status) -> Iterator[Metric]:
    labels = ("group", "index", "step", "arm", "temperature")
    live = _gauge("evaluator_acceptance_length", "By decoding, bonus included.", labels)
    replay = _gauge("evaluator_replay_acceptance_length", "By replay walk, bonus included.", labels)
    speedup = _gauge("evaluator_speedup", "Over decoding without a drafter.", labels)
    best = _gauge("evaluator_best_acceptance_length", "Best of its series so far.", labels)
    alarm = _gauge("evaluator_has_regressed", "1 where it is well below the best.", labels)
    by_tag = _gauge("evaluator_acceptance_length_by_tag", "By decoding.", (*labels, "tag"))
    by_context = _gauge(
        "evaluator_acceptance_length_by_context", "By decoding.", (*labels, "context")
    )
    for result in status.evaluations:
        index = "" if result.index is None else str(result.index)
        values = (result.group, index, str(result.step), result.arm, f"{result.temperature:g}")
        live.add_metric(values, result.acceptance_length)
        if result.replay_acceptance_length is not None:
            replay.add_metric(values, result.replay_acceptance_length)
        speedup.add_metric(values, result.speedup)
        if result.is_headline:
            best.add_metric(values, result.best_acceptance_length)
            alarm.add_metric(values, result.has_regressed)
        for family, parts in ((by_tag, result.by_tag), (by_context, result.by_context)):
            for name, figures in parts.items():
                family.add_metric((*values, name), figures.acceptance_length)
    yield from (live, replay, speedup, best, alarm, by_tag, by_context)
