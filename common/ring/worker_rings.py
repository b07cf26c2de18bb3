"""A worker's rings, one a target, as one source of rows.

    target-0.sock ==> RingConsumer --\
    target-1.sock ==> RingConsumer ---+--> acquire, in turns     waits for: every ring's socket
    ...               (a thread each)                            unblocked by: a descriptor of any

All consumers share one condition, so that who waits listens at all sockets at once. Rings with rows
take turns; a ring without any, or without an owner, is passed over. Each ring is a ring of its own in
everything else: session, ring_epoch, capacity, end.

*Buffers.* Each ring is told `capacity` staging buffers and the worker has that many for each, so a
lease always finds a free one (R4), whichever buffer that is. The other ways to share them out fail:
all buffers told to every ring means descriptors that are dropped and come again only after a
heartbeat; a fixed number over all rings leaves the shares of a slow or dead target idle, while the
others do without a second buffer and no longer copy ahead; and a share can be moved between rings
only after a round trip with the owner that gives it up, who may be stopped. The price is memory.
"""

from collections import Counter, deque
from collections.abc import Sequence

from common.contracts.rows import RowSchema
from common.contracts.sequences import SequenceSet, merge_local_sets, shards_of
from common.errors import LayoutMismatchError
from common.ring.consumer import RingConsumer
from common.ring.endpoint import Endpoint
from common.ring.lease import Lease
from common.ring.listening import SocketCondition


class WorkerRings:
    """One worker at all rings of a run. Sequences here are those of the run.

    `acquire` and `Lease` calls may come from any one thread.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        worker_id: str,
        group: str,
        capacity: int,
        consumed: SequenceSet | None = None,
        gpu: int | None = None,
    ) -> None:
        """Connect to each target, in the order of their indexes; `capacity` is of each ring."""
        self.num_buffers = capacity * len(endpoints)
        """Staging buffers that the worker must have."""
        self._changed = SocketCondition()
        self.rings = tuple(
            RingConsumer(
                endpoint=endpoint,
                worker_id=worker_id,
                group=group,
                capacity=capacity,
                consumed=shard.local_set(consumed or SequenceSet()),
                shard=shard,
                changed=self._changed,
                gpu=gpu,
            )
            for endpoint, shard in zip(endpoints, shards_of(len(endpoints)), strict=True)
        )
        self._turns = deque(self.rings)
        self._first: RingConsumer | None = None
        """Who was welcomed first: all must have rows like its rows."""
        self._over: set[RingConsumer] = set()
        self._is_finished = False

    def schema(self, timeout: float) -> RowSchema | None:
        """Wait for a welcome by any target; return the rows' schema, or None after `timeout`."""
        with self._changed:
            return self._changed.wait_for(self._known_schema, timeout) or None

    @property
    def total_rows(self) -> int | None:
        """Rows of the whole run, where the targets know it."""
        totals = [ring.total_rows for ring in self.rings]
        return next((total for total in totals if total is not None), None)

    def acquire(self, timeout: float) -> Lease | None:
        """READY -lease-> LEASED, by an owner: return the next lease of any ring, or None."""
        with self._changed:
            return self._changed.wait_for(self._next_lease, timeout) or None

    def return_buffer(self, sequence: int) -> None:
        """The staging buffer that held this row is free again."""
        self._ring_of(sequence).return_buffer()

    def mark_consumed(self, sequences: set[int]) -> None:
        """These sequences are in an applied optimizer step (R8)."""
        for ring in self.rings:
            ring.mark_consumed(self._local(ring, sequences))

    def mark_committed(self, sequences: set[int] | None = None) -> None:
        """Every consumed sequence is in a durable checkpoint, or these of them are (R8)."""
        for ring in self.rings:
            ring.mark_committed(None if sequences is None else self._local(ring, sequences))

    def forget(self, sequences: set[int]) -> None:
        """These were trained into weights that are gone: they are captured again (R8)."""
        for ring in self.rings:
            ring.forget(self._local(ring, sequences))

    @property
    def consumed(self) -> SequenceSet:
        """What this worker's weights contain, together with all that is settled group-wide."""
        return merge_local_sets([ring.consumed for ring in self.rings])

    @property
    def is_settled(self) -> bool:
        """Every stream has ended and nothing of the group is on its way: time to commit (R7)."""
        return all(ring.is_settled or self._is_done(ring) for ring in self.rings)

    @property
    def is_drained(self) -> bool:
        """Every row of the group is settled and committed (R7)."""
        return all(self._is_done(ring) for ring in self.rings)

    @property
    def refused_messages(self) -> Counter[str]:
        """Messages of all owners that were dropped, by reason."""
        return sum((ring.refused_messages for ring in self.rings), Counter())

    def end_ring(self, ring: RingConsumer) -> None:
        """Wait for a target no longer: it has ended with every row of its ring committed."""
        self._over.add(ring)

    def unfinished(self) -> list[RingConsumer]:
        """Return the rings whose end has not been told."""
        return [ring for ring in self.rings if not self._is_done(ring)]

    def finish(self) -> None:
        """Have the goodbye say that nobody is to wait for this worker's successor."""
        self._is_finished = True

    def close(self) -> None:
        """Leave every ring; a second call does nothing."""
        for ring in self.rings:
            ring.close(is_finished=self._is_finished)

    def _ring_of(self, sequence: int) -> RingConsumer:
        return self.rings[sequence % len(self.rings)]

    @staticmethod
    def _local(ring: RingConsumer, sequences: set[int]) -> set[int]:
        shard = ring.shard
        return {shard.to_local(s) for s in sequences if shard.holds(s)}

    def _is_done(self, ring: RingConsumer) -> bool:
        return ring.is_drained or ring in self._over

    def _known_schema(self) -> RowSchema | None:
        for ring in self.rings:
            if self._first is None and ring.known_schema is not None:
                self._first = ring
        return self._first.known_schema if self._first is not None else None

    def _next_lease(self) -> Lease | None:
        for ring in self._turns:
            lease = ring.poll()
            if lease is not None:
                self._check_schema(ring)
                self._turns.remove(ring)
                self._turns.append(ring)
                return lease
        return None

    def _check_schema(self, ring: RingConsumer) -> None:
        got, expected = ring.known_schema, self._known_schema()
        if got is None or expected is None or self._first is None or got == expected:
            return
        raise LayoutMismatchError(
            f"ring {ring.endpoint}: rows of another schema than those of {self._first.endpoint}: "
            f"{got.differences(expected)}; give every target server the same config"
        )
