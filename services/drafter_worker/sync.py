"""What the workers of a group tell one another, and what they bring together.

    Word        one member's state, a vector of numbers; `Words` are those of a meeting
    Exchange    what is summed: `AllReduce` gradients and sums of a step, `LocalSgd` weights
    Lineage     which weights these are: rows and saves, as a joiner takes them over

Weights are named by step and lineage, a number that each agreed change draws anew: of two members
with the same step and another lineage one has trained alone, and is healed. All copies go through
fixed vectors and back into the same tensors, so that captured graphs see them.

Moments of `local_sgd` stay each worker's own: to average them would triple the bytes, and the rows
of a group are drawn alike, so that they differ by noise alone. A joiner takes those of one member.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.contracts.sequences import SequenceSet
from common.errors import ConfigError, PeerLostError
from services.drafter_worker.meetings import Meeting
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.step import Stepper

_HASH_BYTES = 6
"""A number of so many bytes is exact in float64."""


class Word(NamedTuple):
    """What a member says when it comes."""

    meeting: int
    """Hash of the meeting's key: all are in the same one."""
    agreement: int
    """Hash of what all must have alike."""
    is_fresh: int
    """Whether it has met nobody since it started: never whom others are healed from."""
    step: int
    lineage: int
    num_micro: int
    """Micro-steps that it brings."""
    num_steps: int
    """Optimizer steps that it has made alone."""
    num_rows: int
    num_tokens: int
    position: int
    """Rows of the stream up to the furthest that it has seen."""
    saved_step: int
    """Step of the newest checkpoint that it knows to be durable; -1 without one."""
    disk_step: int
    """Step of the newest checkpoint that there is; -1 without one."""
    is_settled: int
    """Whether nothing of the stream is left for it, beyond what it brings."""
    is_leaving: int
    is_drained: int
    must_save: int


class Words:
    """The words of a meeting, by rank."""

    def __init__(self, meeting: Meeting, mine: Word) -> None:
        table = meeting.gather(torch.tensor(mine, dtype=torch.float64)).tolist()
        self.all = [Word(*(int(value) for value in row)) for row in table]
        if any(word.meeting != mine.meeting for word in self.all):
            raise PeerLostError("words of another meeting")
        self.source = self._source()
        self.behind = [rank for rank in range(len(self.all)) if not self._is_current(rank)]

    @property
    def are_behind_disk(self) -> bool:
        """Whether a checkpoint is further than all: of members who left, died, or met without these."""
        return max(word.disk_step for word in self.all) > max(word.step for word in self.all)

    @property
    def current(self) -> list[Word]:
        """Words of those that need no healing: what the others bring is void."""
        return [word for rank, word in enumerate(self.all) if rank not in self.behind]

    def num_steps(self, is_local: bool) -> int:
        """Return how many steps this meeting takes the group further."""
        if is_local:
            return max(word.num_steps for word in self.current)
        return int(any(word.num_micro for word in self.current))

    def shares(self, is_local: bool) -> list[float]:
        """Return what each member's part is multiplied by.

        Gradients are sums already; weights are averaged by the tokens they were trained on.
        """
        if not is_local:
            return [float(r not in self.behind and w.num_micro > 0) for r, w in enumerate(self.all)]
        tokens = [0 if rank in self.behind else w.num_tokens for rank, w in enumerate(self.all)]
        total = sum(tokens)
        if total == 0:
            return [float(rank == self.source) for rank in range(len(self.all))]
        return [count / total for count in tokens]

    def _source(self) -> int:
        """Return whose weights count: the furthest, those that most have, the lowest rank."""
        ranks = [r for r, word in enumerate(self.all) if not word.is_fresh]
        ranks = ranks or list(range(len(self.all)))
        top = max(self.all[rank].step for rank in ranks)
        ranks = [rank for rank in ranks if self.all[rank].step == top]
        lineage = Counter(self.all[rank].lineage for rank in ranks).most_common(1)[0][0]
        return next(rank for rank in ranks if self.all[rank].lineage == lineage)

    def _is_current(self, rank: int) -> bool:
        mine, theirs = self.all[rank], self.all[self.source]
        return (mine.step, mine.lineage) == (theirs.step, theirs.lineage)


@dataclass
class Lineage:
    """Which weights the group has, and what is in them; the same at each current member."""

    step: int = 0
    number: int = 0
    saved_step: int = -1
    position: int = 0
    trained_rows: int = 0
    trained_tokens: int = 0
    rows: set[int] = field(default_factory=set)
    """Rows that any member has trained, beyond those that the targets know to be settled."""

    @classmethod
    def of_checkpoint(
        cls, step: int, rows: int, tokens: int, consumed: SequenceSet, *, is_saved: bool
    ) -> "Lineage":
        """Return the lineage of a checkpoint's weights, or of initial ones."""
        known = json.dumps(consumed.model_dump(mode="json"))
        number = hash_of(f"{step} {known}") if step else 0
        return cls(step, number, step if is_saved else -1, 0, rows, tokens, set(consumed.above))

    def advance(self, meeting: Meeting, words: Words, num_steps: int, rows: set[int]) -> None:
        """An exchange has been made: `num_steps` further, with these rows of all members."""
        self.step += num_steps
        self.number = hash_of(f"{self.number} {meeting.quorum.key} {self.step}")
        self.trained_rows += len(rows)
        self.trained_tokens += sum(word.num_tokens for word in words.current)
        self.rows |= rows

    def note_saved(self, step: int) -> None:
        """A checkpoint of this step is durable."""
        self.saved_step = max(self.saved_step, step)

    def as_json(self) -> str:
        """Return all of it, as a joiner reads it."""
        return json.dumps({**vars(self), "rows": sorted(self.rows)})

    @classmethod
    def from_json(cls, text: str) -> "Lineage":
        """Read what `as_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "rows": set(values["rows"])})


class Exchange(Protocol):
    """What members bring together."""

    def load(self, share: float, place: torch.device) -> Tensor:
        """Copy this member's part, times its share, into a vector at `place` and return it."""

    def take(self) -> None:
        """Copy the vector, which has been summed over the members, into place."""


class AllReduce:
    """Gradients, their weight and the step's sums, over all members: a mean over all tokens."""

    def __init__(self, stepper: Stepper) -> None:
        self._copy = SharedVector(stepper.shared_sums())

    def load(self, share: float, place: torch.device) -> Tensor:
        """Copy what has been added since the last step; nothing where the share is 0."""
        vector = self._copy.load(place)
        return vector if share else vector.zero_()

    def take(self) -> None:
        """Copy the sums into place, for the update."""
        self._copy.store()


class LocalSgd:
    """Masters, averaged by the tokens that each member has trained them on."""

    def __init__(self, optimizer: MasterOptimizer) -> None:
        self._optimizer = optimizer
        self._copy = SharedVector(optimizer.masters)

    def load(self, share: float, place: torch.device) -> Tensor:
        """Copy the masters times the share."""
        vector = self._copy.load(place)
        # What is not finite would stay so at a share of 0.
        return vector.mul_(share) if share else vector.zero_()

    def take(self) -> None:
        """Copy the average into the masters and the working weights."""
        self._copy.store()
        self._optimizer.round_to_working()


class SharedVector:
    """A float32 vector that mirrors tensors on a device: one on the host, one on the GPU, as needed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self._vectors: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}
        self._views: list[Tensor] = []
        """Of the vector that was loaded last."""

    @torch.no_grad()
    def load(self, place: torch.device) -> Tensor:
        """Copy the tensors; done when this returns, for whoever uses the vector at its place."""
        if place not in self._vectors:
            self._vectors[place] = self._allocate(place)
        vector, self._views = self._vectors[place]
        torch._foreach_copy_(self._views, self._tensors)
        return vector

    @torch.no_grad()
    def store(self) -> None:
        """Copy the vector that was loaded last into the tensors."""
        torch._foreach_copy_(self._tensors, self._views)

    def _allocate(self, place: torch.device) -> tuple[Tensor, list[Tensor]]:
        is_pinned = place.type == "cpu" and self._tensors[0].is_cuda
        vector = torch.zeros(sum(self._sizes), device=place, pin_memory=is_pinned)
        parts = zip(vector.split(self._sizes), self._tensors, strict=True)
        return vector, [part.view(tensor.shape) for part, tensor in parts]


def gather_rows(meeting: Meeting, words: Words, mine: set[int]) -> set[int]:
    """Return the rows that all current members bring."""
    most = max(word.num_rows for word in words.all)
    if most == 0:
        return set()
    padded = torch.full((most,), -1, dtype=torch.int64)
    if meeting.rank not in words.behind:
        padded[: len(mine)] = torch.tensor(sorted(mine), dtype=torch.int64)
    return {row for row in meeting.gather(padded).flatten().tolist() if row >= 0}


def heal(
    meeting: Meeting, words: Words, lineage: Lineage, state: dict[str, Tensor]
) -> tuple[Lineage, dict[str, Tensor]] | None:
    """Pass the source's lineage and state to those who are behind; return them to those.

    Whole or not at all: `state` is changed by nobody here. The others stand by, so that however long
    it takes altogether, none waits for longer than one tensor takes.
    """
    is_source, is_behind = meeting.rank == words.source, meeting.rank in words.behind
    text = torch.tensor(list(lineage.as_json().encode()), dtype=torch.uint8)
    sizes = meeting.gather(torch.tensor([text.numel()]))
    if not is_source:
        text = torch.zeros(int(sizes[words.source]), dtype=torch.uint8)
    received = {}
    for name, tensor in {"": text, **state}.items():
        if is_source:
            part = tensor.detach().to("cpu").contiguous()
            for rank in words.behind:
                meeting.send(part, rank)
        elif is_behind:
            received[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            meeting.receive(received[name], words.source)
        meeting.gather(torch.zeros(1))
    if not is_behind:
        return None
    found = Lineage.from_json(bytes(received.pop("").tolist()).decode())
    return found, received


def check_agreement(meeting: Meeting, words: Words, mine: dict[str, Any]) -> None:
    """Refuse a member of another config: it raises `ConfigError`, the others meet without it."""
    expected = words.all[words.source].agreement
    if words.all[meeting.rank].agreement != expected:
        theirs = meeting.agreement_of(words.source)
        unlike = [
            f"{key} got {mine.get(key)!r}, expected {theirs.get(key)!r}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        raise ConfigError(
            f"this worker's config is not that of its group: {'; '.join(unlike)}; give all workers "
            f"of a group one config, or this one another training.group"
        )
    strangers = [
        member.name
        for member, word in zip(meeting.quorum.members, words.all, strict=True)
        if word.agreement != expected
    ]
    if strangers:
        raise PeerLostError(f"member {', '.join(strangers)} of another config is refused")


def hash_of(text: str) -> int:
    """Return a number that is exact in float64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_HASH_BYTES])
