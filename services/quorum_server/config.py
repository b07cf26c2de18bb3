"""Tables that the quorum server reads."""

from pydantic import model_validator

from common.config.loading import Table
from common.config.shared import Groups, GroupTable, RunTable
from common.quorum import HOW_TO_INSTALL, is_installed


class QuorumServerConfig(Table):
    """What the quorum server is told."""

    run: RunTable = RunTable()
    groups: Groups = {"main": GroupTable()}

    @property
    def synced(self) -> dict[str, GroupTable]:
        """The groups whose workers agree."""
        return {name: group for name, group in self.groups.items() if group.is_synced}

    @model_validator(mode="after")
    def _has_what_it_serves(self) -> "QuorumServerConfig":
        if not self.synced:
            raise ValueError(
                f"no group of {sorted(self.groups)} has sync other than 'none': a quorum server "
                f"has nobody to serve; set groups.<name>.sync"
            )
        if not is_installed():
            name, group = next(iter(self.synced.items()))
            raise ValueError(f"groups.{name}.sync = {group.sync!r} {HOW_TO_INSTALL}")
        return self
