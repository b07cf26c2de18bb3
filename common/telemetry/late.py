"""A service's answer to its control link from the first moment, while the service still loads."""

from typing import Protocol

from common.contracts.control_messages import Command, Phase, Report
from common.telemetry.control_link import ServiceState


class Controlled(Protocol):
    """A running service, as its link sees it."""

    def describe(self) -> ServiceState:
        """Return its state; called in the link's thread."""

    def obey(self, command: Command) -> None:
        """Note a command; called in the link's thread."""


class LateService:
    """Stands in for a service until `bind`; commands that come before are kept for it."""

    def __init__(self) -> None:
        self._service: Controlled | None = None
        self._state = ServiceState("loading")
        self._kept: list[Command] = []

    def enter(self, phase: Phase, detail: str = "", report: Report | None = None) -> None:
        """Say what the service does before it runs, or why it never will."""
        self._state = ServiceState(phase, detail, report=report)

    def bind(self, service: Controlled) -> None:
        """The service is there: hand it what was kept."""
        self._service = service
        while self._kept:
            service.obey(self._kept.pop(0))

    def describe(self) -> ServiceState:
        """Return the service's state, or what it was said to do until it runs."""
        return self._service.describe() if self._service else self._state

    def obey(self, command: Command) -> None:
        """Pass a command on, or keep it."""
        if self._service:
            self._service.obey(command)
        else:
            self._kept.append(command)
