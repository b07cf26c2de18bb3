"""Chooses where slots live, and says why. A transport that the config names is had or refused."""

from dataclasses import dataclass

from common.config.shared import RingTable, RunTable
from common.errors import ConfigError
from common.ring import cuda
from common.ring.backings import BACKINGS, Backing
from common.ring.peers import gpus_without_peer_access
from common.ring.probe import why_not_cuda_ipc
from common.ring.segment import SEGMENT_DIRECTORY


@dataclass(frozen=True)
class Transport:
    """Where slots live."""

    name: str
    reason: str
    gpu: int | None
    """CUDA device ordinal of the target; None on the CPU."""

    @property
    def backing(self) -> Backing:
        """The segment's class."""
        return BACKINGS[self.name]


def choose_transport(run: RunTable, ring: RingTable, gpu: int | None) -> Transport:
    """Return the transport that the config names, or the better one that works here."""
    if not SEGMENT_DIRECTORY.is_dir():
        raise ConfigError(f"{SEGMENT_DIRECTORY} is missing; mount a tmpfs there")
    if ring.transport == "host":
        return Transport("host", "host: chosen in the config", gpu)
    if gpu is None:
        if ring.transport == "cuda_ipc":
            raise ConfigError(
                f"ring.transport = 'cuda_ipc': run.device is {run.device!r}, expected 'cuda'; set "
                f"ring.transport to 'host' or 'auto'"
            )
        return Transport("host", "host: there is no GPU in this run", None)
    obstacle = _obstacle(ring, gpu)
    if obstacle is None:
        return Transport("cuda_ipc", _why_cuda_ipc(ring), gpu)
    if ring.transport == "cuda_ipc":
        raise ConfigError(
            f"ring.transport = 'cuda_ipc' cannot be had: {obstacle}; set it to 'host' or 'auto' "
            f"(containers: target server and workers need pid and ipc of one service)"
        )
    return Transport("host", f"host: cuda_ipc cannot be had: {obstacle}", gpu)


def transport_that_fits(transport: Transport, ring: RingTable, num_bytes: int) -> Transport:
    """Return the transport, or the host ring where `auto` has chosen a GPU that is too full."""
    if transport.name != "cuda_ipc" or transport.gpu is None:
        return transport
    cuda.use(transport.gpu)
    free, _ = cuda.call("cudaMemGetInfo")
    if num_bytes <= free:
        return transport
    shortage = f"the ring needs {num_bytes} bytes of GPU memory, {free} are free"
    if ring.transport == "cuda_ipc":
        raise ConfigError(
            f"ring.transport = 'cuda_ipc': {shortage}; lower ring.num_slots or data.row_tokens"
        )
    return Transport("host", f"host: {shortage}", transport.gpu)


def _obstacle(ring: RingTable, gpu: int) -> str | None:
    if ring.checksum_payload:
        return "ring.checksum_payload reads every byte on the CPU"
    if ring.transport == "auto":
        apart = gpus_without_peer_access(cuda.gpu_uuid(gpu))
        if apart:
            return f"GPUs {apart} cannot read this GPU's memory"
    return why_not_cuda_ipc(gpu)


def _why_cuda_ipc(ring: RingTable) -> str:
    if ring.transport == "cuda_ipc":
        return "cuda_ipc: chosen in the config; another process opened this GPU's memory"
    return "cuda_ipc: another process opened this GPU's memory, and every GPU here can read it"
