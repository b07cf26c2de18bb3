"""Where slots live is chosen with a reason, or refused with a way out. GPU cases: tests/gpu."""

import pytest

from common.config.shared import RingTable, RunTable
from common.errors import ConfigError
from common.ring.segment import HostSegment
from services.target_server.transport import Transport, choose_transport, transport_that_fits

CPU = RunTable(device="cpu")


@pytest.mark.parametrize(
    ("asked", "reason"), [("host", "chosen in the config"), ("auto", "there is no GPU in this run")]
)
def test_without_a_gpu_the_ring_is_in_host_memory(asked: str, reason: str) -> None:
    transport = choose_transport(CPU, RingTable(transport=asked), None)
    assert (transport.backing, transport.gpu) == (HostSegment, None)
    assert transport.reason == f"host: {reason}"


def test_cuda_ipc_without_a_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"run\.device is 'cpu'.*'host' or 'auto'"):
        choose_transport(CPU, RingTable(transport="cuda_ipc"), None)


def test_a_host_ring_asks_for_no_gpu_memory() -> None:
    transport = Transport("host", "host: chosen in the config", 0)
    assert transport_that_fits(transport, RingTable(), 1 << 60) is transport
