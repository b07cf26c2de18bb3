"""Tables that the control plane reads."""

from common.config.loading import Table
from common.config.shared import ControlPlaneTable, PlacementTable, RunTable


class ControlPlaneConfig(Table):
    """What the control plane is told."""

    run: RunTable = RunTable()
    control_plane: ControlPlaneTable = ControlPlaneTable()
    placement: PlacementTable = PlacementTable()
