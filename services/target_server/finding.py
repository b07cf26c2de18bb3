"""What a check of the doctor reads and says."""

from dataclasses import dataclass
from typing import Literal

from common.config.loading import Table
from common.config.shared import (
    ControlPlaneTable,
    PlacementTable,
    RingTable,
    RunTable,
    TargetTable,
)
from common.drafters.dflash.config import DrafterTable
from services.target_server.data_config import DataTable

State = Literal["ok", "warning", "failed", "skipped"]


class DoctorConfig(Table):
    """What `python -m services.target_server.doctor` reads; all of it may be left out."""

    run: RunTable = RunTable()
    target: TargetTable | None = None
    data: DataTable | None = None
    ring: RingTable = RingTable()
    drafter: DrafterTable = DrafterTable()
    control_plane: ControlPlaneTable = ControlPlaneTable()
    placement: PlacementTable = PlacementTable()


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    text: str
    fix: str = ""
