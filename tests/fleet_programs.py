"""Targets and workers of a run with several rings or groups, as processes without a model.

A target claims its ring and hands out rows as the real one does (`claim_shard`, `RecipeBook`,
`RingOwner`); a worker trains from `WorkerRings`, and its weights are the list of the rows it has
seen. Both append what they do to `<name>.log`, one JSON object a line, and end with the
test, so that none is left behind.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.config.shared import GroupTable
from common.contracts.sequences import SequenceSet
from common.lifecycle import write_atomically
from common.ring import segment
from common.ring.layout import unpack_documents
from common.ring.lease import Lease
from common.ring.owner import RingOwner
from common.ring.worker_rings import WorkerRings
from services.target_server.claim import claim_shard
from services.target_server.recipes import RecipeBook
from tests.forks import Fork
from tests.rings import make_schema, make_table, publish


@dataclass(frozen=True)
class Plan:
    """What a process is to do."""

    folder: str
    shared_memory: str
    """A folder in /dev/shm of this test's own."""
    name: str
    num_targets: int = 2
    num_rows: int = 60
    row_seconds: float = 0.0
    """A target makes, or a worker trains, a row in this time."""
    table: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=lambda: {"main": {}})
    group: str = "main"
    commit_every: int = 4


def start(kind: str, plan: Plan) -> Fork:
    """Start a program; errors go to `<name>.err`."""
    errors = Path(plan.folder) / f"{plan.name}.err"
    return Fork(
        "tests.fleet_programs", kind, json.dumps(asdict(plan)),
        environment=dict(os.environ), stdout=errors, stderr=errors,
    )  # fmt: skip


def write_log(plan: Plan, event: str, **values: Any) -> None:
    """Note what is done, on disk before it goes on."""
    line = json.dumps({"event": event, "pid": os.getpid(), **values}) + "\n"
    with (Path(plan.folder) / f"{plan.name}.log").open("a") as file:
        file.write(line)


def checkpoints(folder: Path, group: str) -> Iterator[dict[str, Any]]:
    """Yield the durable state of each of a group's workers."""
    for path in folder.glob(f"checkpoint-{group}-*.json"):
        yield json.loads(path.read_text())


def consumed_in(state: dict[str, Any]) -> SequenceSet:
    """Return the set that a checkpoint lists."""
    return SequenceSet.model_validate_json(json.dumps(state["consumed"]))


def run_target(plan: Plan) -> None:
    """Publish the rows of one ring, again where one was lost, until all of it is committed."""
    folder = Path(plan.folder)
    shard, lock = claim_shard(folder, plan.num_targets, plan.name)
    segment.reclaim_dead_segments()
    settled = {}
    for group in plan.groups:
        settled[group] = SequenceSet()
        for state in checkpoints(folder, group):
            settled[group] = settled[group].union(consumed_in(state))
    with (
        lock,
        RingOwner(
            endpoint=folder / f"target-{shard.index}.sock",
            run="fleet",
            schema=make_schema(),
            table=make_table(**plan.table),
            groups={name: GroupTable(**values) for name, values in plan.groups.items()},
            total_rows=plan.num_rows,
            settled=settled,
            shard=shard,
        ) as owner,
    ):
        write_log(plan, "ready", index=shard.index)
        rows = filter(shard.holds, range(plan.num_rows))
        recipes = RecipeBook((SimpleNamespace(sequence=s) for s in rows), owner)
        threading.Thread(target=watch, args=(plan, owner), daemon=True).start()
        serve(plan, owner, recipes)
        write_log(plan, "done", report=owner.report().model_dump(mode="json"))


def watch(plan: Plan, owner: RingOwner) -> None:
    """Note the ring's state all the time, also while the target waits for it."""
    while True:
        write_log(plan, "report", report=owner.report().model_dump(mode="json"))
        time.sleep(0.02)


def serve(plan: Plan, owner: RingOwner, recipes: RecipeBook) -> None:
    """Do as the target server's loop does."""
    while not owner.is_drained():
        row = recipes.next_row()
        if row is not None:
            write_log(plan, "publishing", sequence=row.sequence)
            publish(owner, row.sequence, timeout=100.0)
            time.sleep(plan.row_seconds)
        elif recipes.has_ended:
            owner.end(recipes.last_sequence)
            time.sleep(0.02)


class Trainer:
    """Trains on rows one by one, with a checkpoint now and then."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._path = Path(plan.folder) / f"checkpoint-{plan.group}-{plan.name}.json"
        self._trained: list[int] = []
        consumed = SequenceSet()
        if self._path.exists():
            state = json.loads(self._path.read_text())
            self._trained, consumed = state["trained"], consumed_in(state)
        self._saved = len(self._trained)
        self._rings = WorkerRings(
            [Path(plan.folder) / f"target-{index}.sock" for index in range(plan.num_targets)],
            worker_id=plan.name, group=plan.group, capacity=2, consumed=consumed,
        )  # fmt: skip

    def run(self) -> None:
        """Train until every ring is drained."""
        write_log(self._plan, "started", trained=self._trained)
        while not self._rings.is_drained:
            lease = self._rings.acquire(0.05)
            if lease is not None:
                self._train_on(lease)
            is_settled = lease is None and self._rings.is_settled
            if is_settled or len(self._trained) - self._saved >= self._plan.commit_every:
                self._save()
        self._save()  # with the rows of the end that nobody trains
        self._rings.close()
        write_log(self._plan, "done", total_rows=self._rings.total_rows)

    def _train_on(self, lease: Lease) -> None:
        (document,) = unpack_documents(lease.read("documents"), 1)
        tokens = lease.read("token_ids")
        if not lease.is_intact(tokens):
            lease.nack("torn")
            return
        assert document.sample_id == lease.sequence, "a row came under another row's sequence"
        if not lease.release():
            return
        time.sleep(self._plan.row_seconds)
        self._trained.append(lease.sequence)
        write_log(self._plan, "trained", sequence=lease.sequence)
        self._rings.mark_consumed({lease.sequence})
        self._rings.return_buffer(lease.sequence)

    def _save(self) -> None:
        consumed = self._rings.consumed.model_dump(mode="json")
        write_atomically(self._path, json.dumps({"trained": self._trained, "consumed": consumed}))
        self._saved = len(self._trained)
        self._rings.mark_committed()


def main(kind: str, plan: Plan) -> None:
    """Run one of the programs."""
    segment.SEGMENT_DIRECTORY = Path(plan.shared_memory)
    if kind == "target":
        run_target(plan)
    else:
        Trainer(plan).run()


if __name__ == "__main__":
    main(sys.argv[1], Plan(**json.loads(sys.argv[2])))
    os._exit(0)  # at once: what has to be said must be out
