"""`python -m services.drafter_worker`: parse, claim an index, take a GPU, build, train."""

import contextlib
import os
import sys
import threading

from common.config.command_line import parse
from common.drafters.dflash.footprint import worker_bytes
from common.lifecycle import heavy_imports, run_service
from common.placement.place import PlaceSeeker
from common.target.footprint import measure_target
from common.telemetry import logs
from common.telemetry.control_link import ControlLink, Identity
from common.telemetry.late import LateService
from services.drafter_worker.claim import claim_index
from services.drafter_worker.compile_cache import open_cache
from services.drafter_worker.config import WorkerConfig


def main(stop: threading.Event) -> None:
    """Train until the stream ends or a stop is asked for."""
    config = parse(WorkerConfig, "drafter_worker")
    if config is None:
        return
    run, group = config.run, config.training.group
    index, claim = claim_index(run.directory / "checkpoints" / group, f"worker {os.getpid()}")
    instance = f"{group}-{index}"
    logs.configure("drafter_worker", instance, run.name, run.log_level)
    with claim, contextlib.ExitStack() as stack:
        late = LateService()
        link = ControlLink(
            Identity("drafter_worker", instance, run.name),
            run.directory / "control.sock",
            interval_seconds=config.control_plane.heartbeat_seconds,
            describe=late.describe,
            on_command=late.obey,
        )
        stack.enter_context(link)
        gpu_uuid, cache = "", None
        if run.device == "cuda":
            seeker = PlaceSeeker(link, run.directory, config.placement, late.enter, stop)
            place = seeker.take(worker_bytes(config.drafter, measure_target(config.target)))
            if place is None:
                return
            late.enter("loading")
            gpu_uuid, cache = place.gpu.uuid, open_cache(config.drafter.compile_cache)
        # They come after the config is known to be good, and after the cache is set.
        with heavy_imports():
            from services.drafter_worker.assemble import Place, open_worker

        worker = open_worker(
            config, Place(index, instance, cache, gpu_uuid), stop, stack, late.enter
        )
        if worker is not None:
            late.bind(worker)
            worker.run()


if __name__ == "__main__":
    sys.exit(run_service(main))
