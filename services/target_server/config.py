"""The target server's config."""

from pydantic import model_validator

from common.config.loading import Table
from common.config.shared import (
    ControlPlaneTable,
    Groups,
    GroupTable,
    HeldOutTable,
    PlacementTable,
    RingTable,
    RunTable,
    TargetTable,
)
from services.target_server.data_config import DataTable
from services.target_server.generation_config import GenerationTable


class TargetServerConfig(Table):
    """Tables that the target server reads."""

    run: RunTable = RunTable()
    target: TargetTable
    data: DataTable
    generation: GenerationTable = GenerationTable()
    held_out: HeldOutTable = HeldOutTable()
    ring: RingTable = RingTable()
    groups: Groups = {"main": GroupTable()}
    control_plane: ControlPlaneTable = ControlPlaneTable()
    placement: PlacementTable = PlacementTable()

    @model_validator(mode="after")
    def _can_have_its_transport(self) -> "TargetServerConfig":
        if self.ring.transport == "cuda_ipc" and self.run.device != "cuda":
            raise ValueError(
                f"ring.transport = 'cuda_ipc': run.device is {self.run.device!r}, expected 'cuda'; "
                f"set it, or ring.transport to 'host' or 'auto'"
            )
        return self
