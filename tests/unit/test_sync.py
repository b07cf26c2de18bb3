"""Meetings, exchanges and lineages of a synced group: members are threads, all else is real."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.config.loading import load
from common.contracts.sequences import SequenceSet
from common.errors import ConfigError, PeerLostError
from common.quorum import publish_addresses, read_address
from common.ring.worker_protocol import WorkerProtocol
from services.drafter_worker.checkpoint import CheckpointStore, TrainerState
from services.drafter_worker.config import OptimizerTable, WorkerConfig
from services.drafter_worker.gpu_sums import are_apart, identity_of
from services.drafter_worker.meetings import Meeting, Meetings
from services.drafter_worker.optim import MasterOptimizer
from services.drafter_worker.sync import (
    Lineage,
    LocalSgd,
    SharedVector,
    Word,
    Words,
    check_agreement,
    gather_rows,
    hash_of,
    heal,
)
from tests.members import CPU, TABLE, needs_torchft, with_members


def word(**changes: int) -> Word:
    """Return a word of a current member that brings nothing."""
    values = dict.fromkeys(Word._fields, 0)
    return Word(**{**values, **changes})


class Alone:
    """A meeting whose words are given."""

    rank, size = 0, 1

    def __init__(self, words: list[Word]) -> None:
        self._words = words

    def gather(self, part: Tensor) -> Tensor:
        return torch.tensor(self._words, dtype=torch.float64)


def words_of(*given: Word) -> Words:
    return Words(Alone(list(given)), given[0])  # type: ignore[arg-type]


class Net(nn.Module):
    """Something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        # Not torch's own generator: members are threads and would share it.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make_optimizer(**changes: object) -> tuple[Net, MasterOptimizer]:
    net = Net()
    masters = [p.detach().clone() for p in net.parameters()]
    optimizer = MasterOptimizer(net.parameters(), masters, OptimizerTable(**changes), 2)
    optimizer.learning_rate.fill_(0.05)
    return net, optimizer


def add_row(net: Net, optimizer: MasterOptimizer, weight_sum: Tensor, row: int) -> None:
    """Add a row's gradient; rows have different numbers of tokens, and weights."""
    generator = torch.Generator().manual_seed(row)
    num_tokens = 2 + 5 * (row % 3)
    x = torch.randn(num_tokens, 6, generator=generator)
    y = torch.randn(num_tokens, 3, generator=generator)
    weights = torch.rand(num_tokens, generator=generator)
    losses = (net(x) - y).pow(2).sum(-1)
    optimizer.backward((losses * weights).sum())
    weight_sum += weights.sum()


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [((1, 2), True), ((1, 1), False), ((1, 0), False), ((0, 0), False), ((3, 1, 2), True)],
)
def test_only_members_with_a_gpu_each_are_apart(gpus: tuple[int, ...], expected: bool) -> None:
    identities = torch.tensor([[gpu] * 16 for gpu in gpus], dtype=torch.uint8)
    assert are_apart(identities) == expected
    assert not identity_of(CPU).any()


@needs_torchft
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_summed_gradients_of_two_are_those_of_one_worker_with_all_rows(
    tmp_path: Path, kind: str
) -> None:
    shares = [[0, 1, 2, 3, 4], [5]]  # of uneven rows; then one of them has none

    def act(meeting: Meeting, index: int) -> list[Tensor]:
        net, optimizer = make_optimizer(kind=kind)
        weight_sum = torch.zeros(())
        shared = SharedVector([*optimizer.gradient_sums, weight_sum])
        for step in range(4):
            rows = [] if step == 2 and index == 1 else shares[index]
            for row in rows:
                add_row(net, optimizer, weight_sum, row + 6 * step)
            meeting.sum(shared.load(meeting.place))
            shared.store()
            optimizer.update(weight_sum)
            weight_sum.zero_()
        return optimizer.masters

    first, second = with_members(tmp_path, 2, act)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), (
        "bit-equal in a group"
    )
    net, optimizer = make_optimizer(kind=kind)
    for step in range(4):
        weight_sum = torch.zeros(())
        for row in shares[0] + ([] if step == 2 else shares[1]):
            add_row(net, optimizer, weight_sum, row + 6 * step)
        optimizer.update(weight_sum)
    tolerance = 1e-5 if kind == "adamw" else 2e-2  # Muon's products are in bfloat16
    for got, expected in zip(first, optimizer.masters, strict=True):
        assert (got - expected).norm() <= tolerance * expected.norm()
    start = make_optimizer()[1].masters
    assert any((m - s).norm() > 0.01 * s.norm() for m, s in zip(first, start, strict=True))


@needs_torchft
def test_an_average_is_weighted_by_tokens_exact_and_in_place(tmp_path: Path) -> None:
    def act(meeting: Meeting, index: int) -> list[Tensor]:
        _, optimizer = make_optimizer()
        places = [master.data_ptr() for master in optimizer.masters]
        for master in optimizer.masters:
            master.fill_(index + 1.0)
        words = Words(meeting, word(num_tokens=[3, 1][index], num_steps=1))
        exchange = LocalSgd(optimizer)
        meeting.sum(exchange.load(words.shares(is_local=True)[meeting.rank], meeting.place))
        exchange.take()
        assert [master.data_ptr() for master in optimizer.masters] == places
        return optimizer.masters

    for masters in with_members(tmp_path, 2, act):
        assert all(torch.equal(m, torch.full_like(m, 0.75 * 1 + 0.25 * 2)) for m in masters)


@needs_torchft
def test_who_is_behind_gets_weights_moments_and_rows_and_the_source_keeps_its_own(
    tmp_path: Path,
) -> None:
    def act(meeting: Meeting, index: int) -> tuple[Lineage, dict[str, Tensor]]:
        net, optimizer = make_optimizer()
        lineage = Lineage()
        if index != 1:
            for row in range(3):
                weight_sum = torch.zeros(())
                add_row(net, optimizer, weight_sum, row)
                optimizer.update(weight_sum)
            lineage = Lineage(step=3, number=77, position=9, rows={4, 2})
        mine = word(step=lineage.step, lineage=lineage.number, is_fresh=index == 1, num_rows=index)
        words = Words(meeting, mine)
        assert (words.source, words.behind) == (0, [1])
        rows = gather_rows(meeting, words, set(range(10, 10 + index)))
        assert rows == {10, 11}, "a stale member's rows are void"
        found = heal(meeting, words, lineage, optimizer.state())
        assert (found is None) == (index != 1)
        if found is not None:
            lineage, state = found
            optimizer.load_state(state)
        return lineage, optimizer.state()

    (lineage, state), (healed, copy), _ = with_members(tmp_path, 3, act)
    assert healed == lineage == Lineage(step=3, number=77, position=9, rows={2, 4})
    assert state.keys() == copy.keys()
    assert all(torch.equal(state[name], copy[name]) for name in state)
    assert int(copy["num_updates"]) == 3


@needs_torchft
def test_a_member_of_another_config_is_named_and_the_others_meet_again(tmp_path: Path) -> None:
    def act(meeting: Meeting, index: int) -> str:
        agreement = {"rate": index + 1}
        words = Words(meeting, word(agreement=hash_of(str(agreement)), is_fresh=index))
        try:
            check_agreement(meeting, words, agreement)
        except (ConfigError, PeerLostError) as error:
            # The others read its settings while it is still there.
            meeting.gather(torch.zeros(1))
            return f"{type(error).__name__}: {error}"
        return "agreed"

    told = with_members(tmp_path, 2, act, rate_0=1, rate_1=2)
    assert told[0].startswith("PeerLostError")
    assert "rate got 2, expected 1" in told[1]


@needs_torchft
def test_a_lost_member_fails_the_exchange_of_the_others(tmp_path: Path) -> None:
    def act(meeting: Meeting, index: int) -> str:
        if index == 1:
            return "left"
        with pytest.raises(PeerLostError):
            meeting.sum(torch.ones(1000))
        return "noticed"

    assert with_members(tmp_path, 2, act) == ["noticed", "left"]


def test_weights_count_by_step_then_by_those_who_have_them_then_by_rank() -> None:
    words = words_of(
        word(step=4, lineage=1), word(step=5, lineage=2), word(step=5, lineage=3),
        word(step=5, lineage=3), word(step=9, lineage=9, is_fresh=1),
    )  # fmt: skip
    assert (words.source, words.behind) == (2, [0, 1, 4])


def test_those_who_all_start_go_on_from_the_furthest_checkpoint() -> None:
    words = words_of(word(is_fresh=1), word(step=7, lineage=5, is_fresh=1))
    assert (words.source, words.behind) == (1, [0])
    assert words_of(word(is_fresh=1), word(is_fresh=1)).behind == []


def test_shares_leave_out_who_is_behind_or_brings_nothing() -> None:
    words = words_of(
        word(step=2, num_tokens=30, num_micro=1, num_steps=4), word(step=1, num_tokens=50, num_micro=1, num_steps=9),
        word(step=2, num_tokens=10, num_micro=2, num_steps=1), word(step=2),
    )  # fmt: skip
    assert words.shares(is_local=True) == [0.75, 0.0, 0.25, 0.0]
    assert words.shares(is_local=False) == [1.0, 0.0, 1.0, 0.0]
    assert (words.num_steps(is_local=True), words.num_steps(is_local=False)) == (4, 1)
    idle = words_of(word(step=1), word(step=2))
    assert idle.shares(is_local=True) == [0.0, 1.0], "the source's weights stay"


def test_words_of_another_meeting_are_refused() -> None:
    with pytest.raises(PeerLostError, match="another meeting"):
        words_of(word(meeting=1), word(meeting=2))


def test_one_checkpoint_read_twice_is_one_lineage_and_another_is_another() -> None:
    consumed = SequenceSet(low=3, above=(5,))
    one, same = (Lineage.of_checkpoint(4, 4, 9, consumed, is_saved=True) for _ in range(2))
    other = Lineage.of_checkpoint(4, 4, 9, SequenceSet(low=4), is_saved=True)
    assert one == same == Lineage.from_json(one.as_json())
    assert one.number != other.number
    assert (one.saved_step, one.rows) == (4, {5})


def test_forgotten_rows_are_no_longer_said_to_be_trained() -> None:
    protocol = WorkerProtocol(worker_id="w", group="main", capacity=2)
    protocol.mark_consumed({1, 2, 3})
    protocol.mark_committed({1})
    assert protocol.forget({1, 2, 9})
    assert not protocol.forget({9})
    assert protocol.consumed == SequenceSet(above=(1, 3))
    protocol.begin_session(num_acquired=0)
    protocol.hello()
    hello = protocol.outbox[-1]
    assert (hello.consumed.above, hello.committed.above) == ((1, 3), (1,))  # type: ignore[union-attr]


def test_a_shared_series_keeps_what_a_live_writer_has_begun(tmp_path: Path) -> None:
    alive, dead = (
        tmp_path / ".unfinished-step-000001.1",
        tmp_path / ".unfinished-step-000001.999999999",
    )
    alive.mkdir()
    dead.mkdir()
    store = CheckpointStore(tmp_path, 2, is_shared=True)
    assert dead.exists(), "who only reads removes nothing"
    state = TrainerState(step=2, trained_rows=0, trained_tokens=0, consumed=SequenceSet())
    store.save(lambda directory: None, {"0.master": torch.ones(2)}, state, {})
    assert alive.exists()
    assert not dead.exists()
    assert store.newest() == tmp_path / "step-000002"


def test_settings_of_a_group_that_cannot_be_are_named() -> None:
    assert load(WorkerConfig, [], ["target.model=m"], {}).groups["main"].sync == "none"
    for setting, said in {
        "groups.main.sync=ddp": "local_sgd",
        "groups.main.sync_steps=0": "greater than or equal to 1",
        "groups.main.sync_patience_seconds=1": "sync_wait_seconds 2.0",
        "groups.main.sync_wait=3": "unknown key 'groups.main.sync_wait'",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load(WorkerConfig, [], ["target.model=m", setting], {})


def test_the_quorum_server_s_address_is_its_owner_s_alone(tmp_path: Path) -> None:
    assert read_address(tmp_path, "main") is None
    publish_addresses(tmp_path, {"main": "http://127.0.0.1:1"})
    assert read_address(tmp_path, "main") == "http://127.0.0.1:1"
    assert read_address(tmp_path, "other") is None
    assert (tmp_path / "quorum.json").stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / "quorum.json").read_text())["groups"].keys() == {"main"}


def test_a_server_that_is_missing_is_said_once(tmp_path: Path, caplog: Any) -> None:
    with Meetings(tmp_path, "main", 0, TABLE, {}, CPU) as meetings:
        for _ in range(3):
            with pytest.raises(PeerLostError) as caught:
                meetings.open(0)
            meetings.fail(caught.value)
        meetings.fail(PeerLostError("something else"))
    assert caplog.text.count("no quorum server in") == 1
    assert caplog.text.count("something else") == 1
