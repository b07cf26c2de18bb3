"""Both sides of the protocol over a network that loses, repeats and reorders, in random schedules.

Workers crash and lose what no checkpoint holds; owners are restarted with what checkpoints hold.
Then the faults stop, and every row must be trained on the weights that survive.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from common.contracts.record import Record
from common.contracts.ring_messages import (
    Bye,
    Descriptor,
    Heartbeat,
    Hello,
    LeaseRef,
    Nack,
    Pulse,
    Refused,
    Release,
    Welcome,
)
from common.contracts.sequences import ONE_RING, SequenceSet, Shard
from common.errors import RingError
from common.ring.protocol import OwnerProtocol
from common.ring.worker_protocol import WorkerProtocol
from tests.rings import EPOCH, Bench, make_groups, make_schema, make_segment, make_table, row

NUM_ROWS, NUM_SLOTS, CAPACITY = 12, 3, 2
TABLE = make_table(num_slots=NUM_SLOTS, max_attempts=1000)
SEGMENT = make_segment(NUM_SLOTS)


@dataclass
class Checkpoint:
    """What is durable of a worker: the rows in its weights, and the set it lists."""

    trained: Counter[int] = field(default_factory=Counter)
    consumed: SequenceSet = field(default_factory=SequenceSet)


class SimulatedWorker:
    """One worker: a protocol, leases being copied, staged rows, weights, a checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checkpoint = Checkpoint()
        self.start()

    def start(self) -> None:
        """Begin a process from the checkpoint; what an earlier one had beyond it is gone."""
        self.protocol = WorkerProtocol(
            worker_id=self.name, group="main", capacity=CAPACITY, consumed=self.checkpoint.consumed
        )
        self.trained = Counter(self.checkpoint.trained)
        self.waiting: list[Descriptor] = []
        self.staged: list[int] = []
        self.protocol.hello()

    def hear(self, record: Record) -> None:
        protocol = self.protocol
        if isinstance(record, Welcome):
            if protocol.welcome is None and record.session == protocol.session:
                protocol.welcome = record
                protocol.beat()
        elif isinstance(record, Descriptor):
            if protocol.take(record):
                self.waiting.append(record)
        elif isinstance(record, Pulse):
            protocol.hear(record)
        elif isinstance(record, Refused):
            self.hear_refusal(record)

    def hear_refusal(self, refused: Refused) -> None:
        try:
            is_over = self.protocol.is_refused(refused)
        except RingError:  # Hellos of dead sessions came late, twice: as good as another process
            self.start()
            return
        if is_over:
            self.protocol.begin_session(num_acquired=0)
            self.waiting.clear()
            self.protocol.hello()

    def speak(self) -> None:
        if self.protocol.welcome is None:
            self.protocol.hello()
        else:
            self.protocol.beat()

    def copy(self) -> None:
        if self.waiting and len(self.staged) < CAPACITY:
            told = self.waiting.pop(0)
            self.protocol.finish(told, None)
            self.staged.append(told.sequence)

    def train(self) -> None:
        if self.staged:
            sequence = self.staged.pop(0)
            self.trained[sequence] += 1
            self.protocol.mark_consumed({sequence})
            self.protocol.return_buffer()

    def save(self) -> None:
        self.checkpoint = Checkpoint(Counter(self.trained), self.protocol.consumed)
        self.protocol.mark_committed()


class World:
    """An owner, two workers, and the messages between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.epoch = 0
        self.faults: Counter[str] = Counter()
        self.recaptured = 0
        self.requeued = 0
        self.workers = [SimulatedWorker("one"), SimulatedWorker("two")]
        self.to_owner: list[tuple[bytes, Record]] = []
        self.to_workers: list[tuple[bytes, Record]] = []
        self.start_owner()

    def start_owner(self) -> None:
        self.epoch += 1
        settled = SequenceSet()
        for worker in self.workers:
            settled = settled.union(worker.checkpoint.consumed)
        self.owner = OwnerProtocol(
            self.epoch, SEGMENT, make_schema(), table=TABLE, groups=make_groups(),
            settled={"main": settled},
        )  # fmt: skip
        self.cursor = 0

    def produce(self) -> None:
        """Write the next row: one to be captured again, or a fresh one that somebody lacks."""
        slot = self.owner.book.loan()
        if slot is None:
            return
        sequence = self.owner.next_recapture()
        while sequence is None and self.cursor < NUM_ROWS:
            sequence = self.cursor if self.owner.wants(self.cursor) else None
            self.cursor += 1
        if sequence is None:
            self.owner.book.abort(slot)
            self.owner.end(NUM_ROWS - 1)
        else:
            self.owner.publish(slot, row(sequence), self.now)

    def carry(self) -> None:
        """Put what was said on its way."""
        self.to_workers += self.owner.outbox
        self.owner.outbox = []
        for worker in self.workers:
            identity = f"{worker.name}/{worker.protocol.session}".encode()
            self.to_owner += [(identity, record) for record in worker.protocol.outbox]
            worker.protocol.outbox.clear()

    def deliver(self, index: int, *, to_owner: bool, keep: bool = False) -> None:
        queue = self.to_owner if to_owner else self.to_workers
        identity, record = queue[index] if keep else queue.pop(index)
        if to_owner:
            self.owner.receive(identity, record, self.now)
            return
        for worker in self.workers:
            if identity == f"{worker.name}/{worker.protocol.session}".encode():
                worker.hear(record)

    def step(self, *, loss: bool, crash: bool) -> None:
        worker = self.random.choice(self.workers)
        acts = [self.produce, worker.copy, worker.train, worker.speak, self.pass_time]
        acts += [worker.save] * (self.random.random() < 0.2)
        if loss:
            acts += [self.lose, self.repeat]
        if crash and self.random.random() < 0.05:
            acts = [lambda: self.crash(worker), self.restart_owner]
        self.random.choice(acts)()
        self.carry()
        for to_owner in (True, False):
            queue = self.to_owner if to_owner else self.to_workers
            for _ in range(self.random.randrange(3)):
                if queue:
                    self.deliver(
                        self.random.randrange(len(queue)) if loss else 0, to_owner=to_owner
                    )
        self.check()

    def pass_time(self) -> None:
        self.now += 0.05
        self.owner.tick(self.now)

    def lose(self) -> None:
        queue = self.random.choice([self.to_owner, self.to_workers])
        if queue:
            queue.pop(self.random.randrange(len(queue)))

    def repeat(self) -> None:
        to_owner = self.random.random() < 0.5
        queue = self.to_owner if to_owner else self.to_workers
        if queue:
            self.deliver(self.random.randrange(len(queue)), to_owner=to_owner, keep=True)

    def crash(self, worker: SimulatedWorker) -> None:
        self.faults["crash"] += 1
        worker.start()

    def restart_owner(self) -> None:
        self.faults["restart"] += 1
        self.count_owner()
        self.start_owner()

    def count_owner(self) -> None:
        self.requeued += self.owner.book.accounts["main"]["requeued"]
        self.recaptured += self.owner.ledgers["main"].counts["recaptured"]

    def check(self) -> None:
        counts = self.owner.book.accounts["main"]
        ended = counts["released"] + counts["poison"] + counts["skipped"]
        assert counts["published"] == ended + self.owner.book.in_ring("main")
        for worker in self.workers:
            assert len(worker.staged) <= CAPACITY

    def finish(self) -> None:
        """No more faults: everything is delivered in order until the stream is drained."""
        for _ in range(3000):
            self.pass_time()
            self.produce()
            for worker in self.workers:
                worker.copy()
                worker.train()
                if worker.protocol.is_settled and not worker.staged:
                    worker.save()
                worker.speak()
            self.carry()
            while self.to_owner or self.to_workers:
                for to_owner in (True, False):
                    if self.to_owner if to_owner else self.to_workers:
                        self.deliver(0, to_owner=to_owner)
                self.carry()
            self.check()
            if all(worker.protocol.is_drained for worker in self.workers):
                break
        assert all(worker.protocol.is_drained for worker in self.workers)
        self.count_owner()

    def trained(self) -> Counter[int]:
        """How often each row is in the weights that survive."""
        return sum((worker.checkpoint.trained for worker in self.workers), Counter())


@pytest.mark.parametrize("seed", range(40))
def test_a_run_without_faults_trains_every_row_once(seed: int) -> None:
    world = World(seed)
    for _ in range(100):
        world.step(loss=False, crash=False)
    world.finish()
    assert world.trained() == Counter(range(NUM_ROWS))


@pytest.mark.parametrize("seed", range(80))
def test_messages_lost_repeated_and_reordered_lose_no_row(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        world.step(loss=True, crash=False)
    world.finish()
    trained = world.trained()
    assert set(trained) == set(range(NUM_ROWS))
    assert sum(trained.values()) <= NUM_ROWS + world.requeued + world.recaptured


@pytest.mark.parametrize("seed", range(120))
def test_crashes_and_restarts_lose_no_row_on_the_weights_that_survive(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.step(loss=True, crash=True)
    world.finish()
    trained = world.trained()
    assert set(trained) == set(range(NUM_ROWS))
    most = 1 + world.requeued + world.recaptured + world.faults["restart"]
    assert max(trained.values()) <= most


def any_message(chance: random.Random) -> tuple[bytes, Record]:
    """Return a valid message that need not make sense: few values, so that many nearly fit."""
    session, ring_epoch = chance.randrange(1, 4), chance.choice([EPOCH, EPOCH, EPOCH, 1])
    ref = [LeaseRef(slot=chance.randrange(3), generation=chance.randrange(4),
                    lease_id=chance.randrange(20)) for _ in range(3)]  # fmt: skip
    known = [
        SequenceSet.of(chance.sample(range(30), 3), low=chance.randrange(10)) for _ in range(3)
    ]
    values = {
        "ring_epoch": ring_epoch, "session": session, "number": chance.randrange(1000),
        "capacity": chance.randrange(4), "lease": ref[0], "held": tuple(ref), "pid": 1,
        "reason": chance.choice(["torn", "corrupt", "stopping"]), "consumed": known[0],
        "committed": known[1], "staged": known[2], "group": chance.choice(["main", "main", "other"]),
        "worker_id": chance.choice(["one", "two"]),
        "shard": chance.choice([ONE_RING, ONE_RING, Shard(index=1, count=2)]),
        "is_finished": chance.choice([False, True]),
    }  # fmt: skip
    kind = chance.choice([Hello, Heartbeat, Heartbeat, Release, Release, Nack, Bye])
    return b"%d" % chance.choice([session, 1]), kind(**{n: values[n] for n in kind.model_fields})


@pytest.mark.parametrize("seed", range(20))
def test_no_message_that_makes_no_sense_can_raise_or_unbalance_the_accounts(seed: int) -> None:
    chance, bench = random.Random(seed), Bench(num_slots=3, max_attempts=2)
    sequence = 0
    for _ in range(400):
        bench.owner.receive(*any_message(chance), bench.now)
        for _, record in bench.owner.outbox:
            if chance.random() < 0.1:
                bench.owner.undo(record)
        bench.owner.outbox.clear()
        bench.wait(chance.choice([0.0, 0.0, 0.1, 1.0]))
        again = bench.owner.next_recapture()
        if bench.owner.book.slot_counts()["free"]:
            bench.publish(sequence if again is None else again)
            sequence += again is None
        bench.accounts()
