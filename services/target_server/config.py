"""The target server's config."""

from common.config.loading import Table
from common.config.shared import (
    ControlPlaneTable,
    Groups,
    GroupTable,
    RingTable,
    RunTable,
    TargetTable,
)
from services.target_server.data_config import DataTable


class TargetServerConfig(Table):
    """Tables that the target server reads."""

    run: RunTable = RunTable()
    target: TargetTable
    data: DataTable
    ring: RingTable = RingTable()
    groups: Groups = {"main": GroupTable()}
    control_plane: ControlPlaneTable = ControlPlaneTable()
