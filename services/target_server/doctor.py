"""`python -m services.target_server.doctor`: will a run work on this machine, and if not, what mends it?

Each check does the thing itself, in small, and says what it found; one that fails names the fix. Nothing
of a run is changed. What a config has (target, transport, ring, port) is checked as that run would have it.
"""

import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import ControlPlaneTable, RingTable, RunTable, TargetTable
from common.errors import RingdraftError
from common.lifecycle import lock_holder, run_service
from common.telemetry import logs
from services.target_server.data_config import DataTable

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}
_DOCKER_BYTES = 64 << 20
_MIB = 1 << 20


class DoctorConfig(Table):
    """What `python -m services.target_server.doctor` reads; all of it may be left out."""

    run: RunTable = RunTable()
    target: TargetTable | None = None
    data: DataTable | None = None
    ring: RingTable = RingTable()
    control_plane: ControlPlaneTable = ControlPlaneTable()


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: Literal["ok", "warning", "failed", "skipped"]
    text: str
    fix: str = ""


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Yield what every check finds; one that raises has failed."""
    checks: tuple[tuple[str, Callable[[DoctorConfig, str], Finding]], ...] = (
        ("packages", check_packages),
        ("driver", check_driver),
        ("GPU", check_gpu),
        ("peer access", check_peers),
        ("transport", check_transport),
        ("/dev/shm", check_shared_memory),
        ("ring", check_ring),
        ("namespaces", check_namespaces),
        ("run directory", check_directory),
        ("port", check_port),
    )
    for name, check in checks:
        try:
            yield check(config, name)
        except (RingdraftError, OSError) as error:
            yield Finding(name, "failed", str(error))


def check_packages(_: DoctorConfig, name: str) -> Finding:
    """Compare what is installed with what the distribution asks for."""
    try:
        asked = [Requirement(text) for text in metadata.requires("ringdraft") or []]
    except metadata.PackageNotFoundError:
        return Finding(name, "skipped", "run from a source tree that is not installed")
    wrong = []
    for requirement in asked:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = _version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wrong.append(
                    f"{requirement.name} got {found or 'none'}, expected {requirement.specifier}"
                )
    if wrong:
        fix = (
            "pip install -c constraints.txt -e . in the source tree, or the versions that are named"
        )
        return Finding(name, "failed", "; ".join(wrong), fix)
    return Finding(
        name, "ok", f"torch {_version('torch')}, transformers {_version('transformers')}"
    )


def check_driver(config: DoctorConfig, name: str) -> Finding:
    """Ask the NVIDIA driver for its GPUs."""
    state: Literal["failed", "ok"] = "failed" if config.run.device == "cuda" else "ok"
    try:
        import pynvml
    except ImportError:
        fix = "pip install 'ringdraft[gpu]'" if state == "failed" else ""
        return Finding(name, state, "nvidia-ml-py is not installed: GPUs cannot be listed", fix)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "install the NVIDIA driver (containers: the NVIDIA container toolkit, and a device reservation)"
        return Finding(name, state, f"no NVIDIA driver: {error}", fix if state == "failed" else "")
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [f"{pynvml.nvmlDeviceGetName(h)} {pynvml.nvmlDeviceGetUUID(h)}" for h in handles]
        in_parts = [gpu for gpu, handle in zip(gpus, handles, strict=True) if _is_in_parts(handle)]
        text = f"driver {pynvml.nvmlSystemGetDriverVersion()}: {'; '.join(gpus)}"
    finally:
        pynvml.nvmlShutdown()
    if in_parts:
        return Finding(
            name,
            "warning",
            f"{text}; MIG is on: parts of a GPU share no memory",
            "rows go through host memory",
        )
    return Finding(name, "ok", text)


def check_gpu(config: DoctorConfig, name: str) -> Finding:
    """Ask torch for a GPU, where the run wants one."""
    if config.run.device != "cuda":
        return Finding(name, "skipped", f"run.device is {config.run.device!r}")
    import torch

    if torch.cuda.is_available():
        return Finding(name, "ok", f"{torch.cuda.device_count()} for torch {torch.__version__}")
    if torch.version.cuda is None:
        return Finding(
            name,
            "failed",
            f"torch {torch.__version__} is built without CUDA",
            "install a CUDA build of torch",
        )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 - reports what the driver is told
    return Finding(
        name, "failed", f"torch {torch.__version__} finds no GPU; CUDA_VISIBLE_DEVICES is {shown!r}",
        f"unset it, or install a driver for CUDA {torch.version.cuda}",
    )  # fmt: skip


def check_peers(config: DoctorConfig, name: str) -> Finding:
    """Ask which GPUs cannot read the memory of the run's first one."""
    if (gpu := _gpu(config)) is None:
        return Finding(name, "skipped", "no GPU in this run")
    from common.ring import cuda
    from common.ring.peers import gpus_without_peer_access

    if apart := gpus_without_peer_access(cuda.gpu_uuid(gpu)):
        return Finding(
            name,
            "warning",
            f"GPUs {apart} cannot read GPU {gpu}",
            "workers on them need ring.transport = 'host'",
        )
    return Finding(name, "ok", f"every GPU can read GPU {gpu}")


def check_transport(config: DoctorConfig, name: str) -> Finding:
    """Choose the transport as the target server does: another process opens memory of ours."""
    from services.target_server.transport import choose_transport

    return Finding(name, "ok", choose_transport(config.run, config.ring, _gpu(config)).reason)


def check_shared_memory(_: DoctorConfig, name: str) -> Finding:
    """Look at the size of /dev/shm and at what dead runs have left there."""
    from common.ring.segment import SEGMENT_DIRECTORY, dead_segments

    status = os.statvfs(SEGMENT_DIRECTORY)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{free // _MIB} of {size // _MIB} MiB are free"
    if left := [num_bytes for _, num_bytes in dead_segments()]:
        text += f"; {len(left)} segments of dead target servers hold {sum(left) // _MIB} MiB"
        return Finding(name, "warning", text, "the next target server that starts removes them")
    if size <= _DOCKER_BYTES:
        return Finding(
            name,
            "warning",
            f"{text}: what Docker gives where nothing is said",
            "set shm_size (compose: SHM_SIZE)",
        )
    return Finding(name, "ok", text)


def check_ring(config: DoctorConfig, name: str) -> Finding:
    """Make a ring of the run's size in /dev/shm, and let it go."""
    if config.target is None or config.data is None:
        return Finding(name, "skipped", "needs a config with [target] and [data]")
    from common.ring.segment import SEGMENT_PREFIX, HostSegment

    slots, slot_bytes = config.ring.num_slots, _slot_bytes(config, config.target, config.data)
    place = f"{SEGMENT_PREFIX}doctor-{os.getpid()}-{'0' * 8}-{secrets.randbits(64):016x}"
    HostSegment.create(place, slots, slot_bytes).close()
    return Finding(
        name,
        "ok",
        f"{slots} slots of {slot_bytes / _MIB:.1f} MiB fit, {slots * slot_bytes // _MIB} MiB in all",
    )


def check_namespaces(config: DoctorConfig, name: str) -> Finding:
    """Look for the memory of the rings that live in the run's directory."""
    from common.ring.owner import place_of
    from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX

    sockets = [
        path for path in sorted(config.run.directory.glob("target-*.sock"))
        if lock_holder(path.with_suffix(".lock")) is not None
    ]  # fmt: skip
    if not sockets:
        return Finding(name, "skipped", f"no target server is at work in {config.run.directory}")
    hidden = [
        path.name for path in sockets
        if not list(SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*-{place_of(path)}-*"))
    ]  # fmt: skip
    if hidden:
        return Finding(
            name,
            "failed",
            f"{', '.join(hidden)}: a target server answers, its memory is not in this /dev/shm",
            "containers: give target server and workers `ipc` and `pid` of one service; a ring in GPU memory has none there",
        )
    return Finding(
        name, "ok", f"the memory of {', '.join(path.name for path in sockets)} is in sight"
    )


def check_directory(config: DoctorConfig, name: str) -> Finding:
    """Try to write in the run's directory, or in the next one above it that exists."""
    directory = config.run.directory.absolute()
    above = next(path for path in (directory, *directory.parents) if path.exists())
    trial = above / f".ringdraft-doctor-{os.getpid()}"
    try:
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        return Finding(
            name,
            "failed",
            f"{above}: {error.strerror}",
            "make it writable for this user, or choose another run.directory",
        )
    return Finding(name, "ok", f"{directory} can be written")


def check_port(config: DoctorConfig, name: str) -> Finding:
    """Try to bind the control plane's address."""
    table = config.control_plane
    try:
        socket.create_server((table.host, table.port)).close()
    except OSError as error:
        return Finding(
            name,
            "warning",
            f"{table.host}:{table.port}: {error.strerror}",
            "another port is taken by `up`; set control_plane.port where it matters",
        )
    return Finding(name, "ok", f"{table.host}:{table.port} is free")


def _slot_bytes(config: DoctorConfig, target: TargetTable, data: DataTable) -> int:
    from common.contracts.rows import RowSchema
    from common.ring.layout import SlotLayout
    from common.target.loading import describe_target, resolve_target_layer_ids

    found = describe_target(target)
    return SlotLayout(
        RowSchema(
            row_tokens=data.row_tokens,
            max_documents=data.max_documents,
            hidden_size=found.hidden_size,
            target_layer_ids=resolve_target_layer_ids(target, found.num_layers),
            aux_dtype="float8_e4m3fn" if config.ring.aux_dtype == "fp8" else "bfloat16",
            has_last_hidden_states_normed=target.last_hidden_states_normed,
            target_fingerprint="",
            template_fingerprint="",
            feature_engine="",
        )
    ).slot_bytes


def _gpu(config: DoctorConfig) -> int | None:
    if config.run.device != "cuda":
        return None
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _is_in_parts(handle: object) -> bool:
    import pynvml

    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:
        return False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(stop: threading.Event) -> int:
    """Examine by the command line; 1 where a check fails."""
    config = parse(DoctorConfig, "target_server.doctor")
    if config is None:
        return 0
    logs.configure("doctor", "0", config.run.name, config.run.log_level)
    console, findings = Console(stderr=True, highlight=False), []
    for finding in examine(config):
        findings.append(finding)
        colour = _COLOURS[finding.state]
        fix = f"\n          -> {escape(finding.fix)}" if finding.fix else ""
        console.print(
            f"[{colour}]{finding.state:8}[/] {finding.check}: {escape(finding.text)}{fix}"
        )
        if stop.is_set():
            break
    failed = [finding.check for finding in findings if finding.state == "failed"]
    print(json.dumps({"failed": failed, "findings": [asdict(f) for f in findings]}))  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_service(main))
