"""A process that takes a GPU as services do, says so in one JSON line, and holds it until a stop.

python -m tests.placement_program RUN_DIRECTORY SERVICE INSTANCE BYTES [table.key=value ...]
"""

import json
import os
import sys
import threading
from pathlib import Path

from common.config.loading import Table, load
from common.config.shared import PlacementTable
from common.errors import RingdraftError
from common.lifecycle import run_service
from common.placement.place import PlaceSeeker
from common.telemetry.control_link import ControlLink, Identity
from common.telemetry.late import LateService
from tests.heartbeats import RUN
from tests.seekers import FAKE_NVML

# A child of a test that died ends by itself.
LIFE_SECONDS = 300.0


class ProgramConfig(Table):
    placement: PlacementTable = PlacementTable()


def read_described_gpus() -> None:
    """Have NVML be the described one: this process is forked, and may have loaded another."""
    sys.path.insert(0, str(FAKE_NVML))
    sys.modules.pop("pynvml", None)


def main(stop: threading.Event) -> None:
    directory, service, instance, num_bytes, *settings = sys.argv[1:]
    read_described_gpus()
    table = load(ProgramConfig, [], settings, environment={}).placement
    late = LateService()
    with ControlLink(
        Identity(service, instance, RUN), Path(directory) / "control.sock",
        interval_seconds=0.2, describe=late.describe, on_command=late.obey,
    ) as link:  # fmt: skip
        try:
            place = PlaceSeeker(link, Path(directory), table, late.enter, stop).take(int(num_bytes))
        except RingdraftError as error:
            say(kind=type(error).__name__, error=str(error))
            return
        if place is not None:
            say(uuid=place.gpu.uuid, reason=place.reason, shown=os.environ["CUDA_VISIBLE_DEVICES"])
            late.enter("running")
            stop.wait(LIFE_SECONDS)


def say(**what: str) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(run_service(main))
