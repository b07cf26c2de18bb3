"""Members of a synced group as threads of one process: lighthouse, meetings and Gloo are real."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from common.config.shared import GroupTable
from common.quorum import is_installed, publish_addresses, start_lighthouse
from services.drafter_worker.meetings import Meeting, Meetings

needs_torchft = pytest.mark.skipif(
    not is_installed(), reason="torchft (extra sync) is not installed"
)
TABLE = GroupTable(
    sync="allreduce", sync_lease_seconds=1.0, sync_wait_seconds=0.2,
    sync_patience_seconds=10.0, sync_transfer_seconds=10.0,
)  # fmt: skip
CPU = torch.device("cpu")
Result = TypeVar("Result")


def with_members(
    directory: Path,
    count: int,
    act: Callable[[Meeting, int], Result],
    devices: Sequence[torch.device] = (CPU,),
    **agreements: Any,
) -> list[Result]:
    """Have members meet and act in threads; return what each returns, by rank."""
    lighthouse = start_lighthouse(TABLE.sync_lease_seconds, TABLE.sync_patience_seconds)
    publish_addresses(directory, {"main": lighthouse.url})
    found: dict[int, Any] = {}

    def be(index: int) -> None:
        device = devices[index % len(devices)]
        agreement = {"rate": agreements.get(f"rate_{index}", 1)}
        try:
            with Meetings(directory, "main", index, TABLE, agreement, device) as meetings:
                meeting = meetings.open(0)
                while meeting.size < count:
                    meeting = meetings.open(0)
                found[index] = act(meeting, index)
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
            found[index] = error

    threads = [threading.Thread(target=be, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lighthouse.close()
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[index] for index in range(count)]
