"""Members with a GPU each sum between GPUs, and give up one who does not come."""

import time
from pathlib import Path

import pytest
import torch

from common.errors import PeerLostError
from services.drafter_worker.gpu_sums import are_apart, identity_of
from services.drafter_worker.meetings import Meeting
from services.drafter_worker.sync import SharedVector
from tests.members import TABLE, needs_torchft, with_members

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(120),
    needs_torchft,
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def sum_once(meeting: Meeting, index: int) -> torch.Tensor:
    device = torch.device("cuda", index % torch.cuda.device_count())
    tensors = [torch.full((3, 5), index + 0.5, device=device), torch.arange(7.0, device=device)]
    shared = SharedVector(tensors)
    vector = shared.load(meeting.place)
    assert vector.device == meeting.place
    meeting.sum(vector)
    shared.store()
    return torch.cat([tensor.flatten().cpu() for tensor in tensors])


def test_members_on_one_gpu_sum_in_host_memory(tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    identity = identity_of(gpu)
    assert identity.any()
    assert not are_apart(torch.stack([identity, identity]))

    def act(meeting: Meeting, _: int) -> torch.Tensor:
        assert meeting.place.type == "cpu"
        return sum_once(meeting, 0)

    first, second = with_members(tmp_path, 2, act, [gpu])
    assert torch.equal(first, second)
    assert (first[:15] == 1.0).all()


@needs_two
def test_members_on_gpus_of_their_own_sum_between_them(tmp_path: Path) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]

    def act(meeting: Meeting, index: int) -> torch.Tensor:
        assert meeting.place == gpus[index]
        return sum_once(meeting, index)

    first, second = with_members(tmp_path, 2, act, gpus)
    assert torch.equal(first, second)
    assert (first[:15] == 2.0).all()
    assert torch.equal(first[15:], 2 * torch.arange(7.0))


@needs_two
def test_a_sum_that_one_member_stays_away_from_fails_in_time(tmp_path: Path) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]

    def act(meeting: Meeting, index: int) -> bool:
        if index == 1:
            return False
        began_at = time.monotonic()
        with pytest.raises(PeerLostError, match="sum"):
            meeting.sum(torch.zeros(8, device=meeting.place))
        return time.monotonic() - began_at >= TABLE.sync_transfer_seconds / 2

    assert with_members(tmp_path, 2, act, gpus)[0]
