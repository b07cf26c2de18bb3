"""`python -m services.target_server.doctor`: will a run work on this machine, and if not, what mends it?

Each check does the thing itself, in small, and says what it found; one that fails names the fix. Nothing
of a run is changed. What a config has (target, transport, ring, port) is checked as that run would have it.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from common.config.command_line import parse
from common.config.environment import read_visible_gpus
from common.config.shared import TargetTable
from common.contracts.placement_messages import GpuClaim, GpuRefusal
from common.errors import ConfigError, RingdraftError
from common.lifecycle import lock_holder, run_service
from common.placement.nvml import read_gpus
from common.placement.policy import PlacementPolicy
from common.placement.visible import visible_gpus
from common.telemetry import logs
from services.target_server.containers import check_container, check_namespaces, fix_here
from services.target_server.data_config import DataTable
from services.target_server.estimate import EstimateConfig, gpu_bytes
from services.target_server.finding import DoctorConfig, Finding, State

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}
_DOCKER_BYTES = 64 << 20
_MIB = 1 << 20
_GPU_KEY = (
    "compose.gpu.yaml, whose `deploy.resources.reservations.devices` asks the engine for GPUs by "
    "the NVIDIA container toolkit"
)
_DRIVER = "install the NVIDIA driver, until `nvidia-smi -L` lists the GPUs"
_ON_CPU = "run on the CPU with run.device = 'cpu'"


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Yield what every check finds; one that raises has failed."""
    directory = f"let this user read {config.run.directory}, or choose another run.directory"
    checks: tuple[tuple[str, Callable[[DoctorConfig, str], Finding], str], ...] = (
        ("packages", check_packages, "install the package again"),
        ("driver", check_driver, _gpu_fix()),
        ("GPU", check_gpu, _gpu_fix()),
        ("places", check_places, "mend [target] and [data]: `ringdraft estimate` reads the same of them"),
        ("peer access", check_peers, "set ring.transport = 'host'"),
        ("transport", check_transport, "set ring.transport to 'auto' or 'host'"),
        ("/dev/shm", check_shared_memory, "mount a tmpfs at /dev/shm"),
        ("ring", check_ring, _shm_fix("lower ring.num_slots or data.row_tokens")),
        ("namespaces", check_namespaces, directory),
        ("container", check_container, "mount /proc and /tmp"),
        ("run directory", check_directory, directory),
        ("port", check_port, "set control_plane.host to an address of this machine"),
    )  # fmt: skip
    for name, check, fix in checks:
        try:
            yield check(config, name)
        except (RingdraftError, OSError) as error:
            yield Finding(name, "failed", str(error), fix)


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
    try:
        gpus = read_gpus()
    except ConfigError as error:
        if config.run.device == "cuda":
            return Finding(name, "failed", str(error), _gpu_fix())
        return Finding(name, "ok", f"run.device is {config.run.device!r}, which needs none")
    text = "; ".join(f"{gpu.index}: {gpu.name} {gpu.uuid}" for gpu in gpus) or "no GPU"
    if any(gpu.is_in_parts for gpu in gpus):
        fix = "rows go through host memory"
        return Finding(name, "warning", f"{text}; MIG is on: parts of a GPU share no memory", fix)
    return Finding(name, "ok", text)


def check_places(config: DoctorConfig, name: str) -> Finding:
    """Ask which GPU each kind of process would take if it were the first."""
    if config.run.device != "cuda" or config.target is None or config.data is None:
        return Finding(
            name, "skipped", "needs run.device = 'cuda' and a config with [target] and [data]"
        )
    try:
        gpus = visible_gpus(read_gpus(), read_visible_gpus())
    except ConfigError as error:
        return Finding(name, "failed", str(error), _gpu_fix())
    policy, found = PlacementPolicy(config.placement), []
    needs = EstimateConfig(
        run=config.run,
        target=config.target,
        data=config.data,
        ring=config.ring,
        drafter=config.drafter,
    )
    for service, num_bytes in gpu_bytes(needs).items():
        answer = policy.choose(service, GpuClaim(gpus=gpus, num_bytes=num_bytes), [])
        if isinstance(answer, GpuRefusal):
            state: State = "warning" if service == "evaluator" else "failed"
            return Finding(name, state, answer.reason, _place_fix(sees_none=not gpus))
        found.append(f"{service} {answer.gpu_uuid} (about {num_bytes // _MIB} MiB)")
    return Finding(name, "ok", f"alone each would take: {', '.join(found)}")


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
            fix_here(
                f"install a CUDA build of torch; or {_ON_CPU}",
                compose="compose.gpu.yaml, whose TORCH_INDEX is one",
            ),
        )
    shown = read_visible_gpus()
    return Finding(
        name, "failed", f"torch {torch.__version__} finds no GPU; CUDA_VISIBLE_DEVICES is {shown!r}",
        fix_here(
            f"{'' if shown is None else 'unset it, or '}install a driver for CUDA {torch.version.cuda}",
            compose=_GPU_KEY,
        ),
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
            _shm_fix(),
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
            fix_here(
                "make it writable for this user, or choose another run.directory",
                compose="`volumes`, with a volume at RINGDRAFT_RUN__DIRECTORY",
            ),
        )
    return Finding(name, "ok", f"{directory} can be written")


def check_port(config: DoctorConfig, name: str) -> Finding:
    """Try to bind the control plane's address."""
    table = config.control_plane
    with contextlib.suppress(OSError):  # what is wrong with the directory is another check's
        if (pid := lock_holder(config.run.directory / "control.lock")) is not None:
            return Finding(name, "ok", f"the run's control plane (pid {pid}) is at work")
    try:
        socket.create_server((table.host, table.port)).close()
    except OSError as error:
        return Finding(
            name,
            "warning",
            f"{table.host}:{table.port}: {error.strerror}",
            fix_here(
                "another port is taken by `up`; set control_plane.port where it matters",
                compose="`network_mode: service:namespaces`, or CONTROL_PORT for the host's",
            ),
        )
    return Finding(name, "ok", f"{table.host}:{table.port} is free")


def _gpu_fix() -> str:
    bare, key = _DRIVER, _GPU_KEY
    if _version("nvidia-ml-py") is None:
        bare, key = "pip install 'ringdraft[gpu]'", f"{key}, and whose EXTRAS has `gpu`"
    return fix_here(_ON_CPU, bare=bare, compose=key)


def _place_fix(*, sees_none: bool) -> str:
    if sees_none:
        return fix_here(
            "unset CUDA_VISIBLE_DEVICES, or name GPUs of `nvidia-smi -L` in it", compose=_GPU_KEY
        )
    return fix_here(
        "make one of the changes that it names; `ringdraft estimate` shows what takes the memory",
        compose=_GPU_KEY,
    )


def _shm_fix(anywhere: str = "") -> str:
    return fix_here(
        anywhere,
        bare="as root: `mount -o remount,size=<bytes> /dev/shm`, with what `ringdraft estimate` says",
        compose="`shm_size` of the service that owns the IPC namespace, here SHM_SIZE",
    )


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
