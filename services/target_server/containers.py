"""What the doctor sees of the container that it is in, and what mends a finding there and elsewhere."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.lifecycle import lock_holder
from common.ring.owner import place_of
from common.ring.segment import SEGMENT_DIRECTORY, SEGMENT_PREFIX
from services.target_server.finding import DoctorConfig, Finding

_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_SHARE = "`ipc: service:namespaces` and `pid: service:namespaces` in each service of the run"

_LOOK_INSIDE = (
    "start workers, and the doctor, where the target server runs (`docker compose exec target-server "
    "ringdraft doctor`), not beside its container"
)


@dataclass(frozen=True)
class Facts:
    """How a container confines this process."""

    user_id: int
    capabilities: int
    """Effective ones, as a bit mask."""
    has_new_privileges: bool
    """A program may gain privileges that this process has not."""
    is_root_writable: bool
    is_temporary_writable: bool
    is_temporary_executable: bool
    locked_bytes: int
    """Most memory that may be pinned; -1 for any."""
    is_first: bool
    """Its PID namespace begins with its own container."""


def is_container() -> bool:
    """Whether this process is in one, by the marks that engines leave."""
    return any(mark.exists() for mark in _MARKS)


def fix_here(anywhere: str = "", *, bare: str = "", compose: str = "") -> str:
    """Return the fix for where this process is: keys of compose files are for containers alone.

    Args:
        anywhere: what helps on every machine.
        bare: what helps besides where this is no container.
        compose: the key that helps besides where it is one.
    """
    here = bare
    if is_container():
        here = f"compose: {compose}" if compose else ""
    return "; or ".join(part for part in (anywhere, here) if part)


def read_facts() -> Facts:
    """Return how this process is confined."""
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines()
        if ":\t" in line
    )  # fmt: skip
    temporary = os.statvfs("/tmp")
    return Facts(
        user_id=os.geteuid(),
        capabilities=int(status["CapEff"], 16),
        has_new_privileges=status["NoNewPrivs"].strip() == "0",
        is_root_writable=not os.statvfs("/").f_flag & os.ST_RDONLY,
        is_temporary_writable=os.access("/tmp", os.W_OK),
        is_temporary_executable=not temporary.f_flag & os.ST_NOEXEC,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        is_first=_first_ancestor() == 1,
    )


def check_container(config: DoctorConfig, name: str) -> Finding:
    """Look at user, capabilities and file systems, where this is a container."""
    if not is_container():
        return Finding(name, "skipped", "this is none")
    return judge(read_facts(), name, needs_gpu=config.run.device == "cuda")


def judge(facts: Facts, name: str, *, needs_gpu: bool) -> Finding:
    """Return what is wrong with a container: what stops a run before what is merely open."""
    broken = list(_broken(facts, needs_gpu=needs_gpu))
    loose = list(_loose(facts))
    if wrong := broken or loose:
        texts, fixes = zip(*wrong, strict=True)
        return Finding(
            name,
            "failed" if broken else "warning",
            "; ".join(texts),
            "compose: " + ", ".join(fixes),
        )
    return Finding(name, "ok", f"confined, as user {facts.user_id}")


def check_namespaces(config: DoctorConfig, name: str) -> Finding:
    """Look for the processes and the memory of the rings that live in the run's directory."""
    locks = {
        path: pid for path in sorted(config.run.directory.glob("target-*.lock"))
        if (pid := lock_holder(path)) is not None
    }  # fmt: skip
    if not locks:
        return _own_namespaces(config, name)
    if strangers := [path.stem for path, pid in locks.items() if not _has_open(pid, path)]:
        return Finding(
            name, "failed",
            f"{', '.join(strangers)}: a target server is at work, its process is not in sight: it is in "
            f"another PID namespace, where CUDA IPC does not work",
            fix_here(bare=_LOOK_INSIDE, compose=_SHARE),
        )  # fmt: skip
    rings = [path for path in locks if path.with_suffix(".sock").exists()]
    if hidden := [path.stem for path in rings if not _segments(path.with_suffix(".sock"))]:
        return Finding(
            name, "failed",
            f"{', '.join(hidden)}: a target server answers, its memory is not in this /dev/shm",
            fix_here(bare=_LOOK_INSIDE, compose=_SHARE),
        )  # fmt: skip
    return Finding(
        name, "ok", f"{', '.join(path.stem for path in locks)}: in sight, with its memory"
    )


def _own_namespaces(config: DoctorConfig, name: str) -> Finding:
    text = f"no target server is at work in {config.run.directory}"
    if is_container() and read_facts().is_first:
        text += (
            f"; this container has a PID namespace of its own, so a run in several needs {_SHARE}"
        )
    elif is_container():
        text += "; this container shares the PID namespace of another"
    return Finding(name, "skipped", text)


def _broken(facts: Facts, *, needs_gpu: bool) -> Iterator[tuple[str, str]]:
    if not facts.is_temporary_writable:
        yield "/tmp cannot be written", '`tmpfs: ["/tmp:exec,mode=1777"]`'
    elif not facts.is_temporary_executable:
        yield (
            "/tmp runs no programs, which compilers build there",
            '`tmpfs: ["/tmp:exec,mode=1777"]`',
        )
    if needs_gpu and facts.locked_bytes != resource.RLIM_INFINITY:
        text = f"{facts.locked_bytes} bytes may be pinned, and a ring in /dev/shm is pinned whole"
        yield text, "`ulimits: { memlock: -1 }`"


def _loose(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.user_id == 0:
        yield "it runs as root", '`user: "1000"`'
    if facts.is_root_writable:
        yield "its root file system can be written", "`read_only: true`"
    if facts.capabilities:
        yield f"it has capabilities {facts.capabilities:#x}", "`cap_drop: [ALL]`"
    if facts.has_new_privileges:
        yield "programs may gain privileges", '`security_opt: ["no-new-privileges:true"]`'


def _segments(endpoint: Path) -> list[Path]:
    return list(SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*-{place_of(endpoint)}-*"))


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process of that PID here is the one that holds the file; True where it hides it."""
    try:
        # By the file itself: in another container it may have another path.
        return any(path.samefile(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return True
    except OSError:
        return False


def _first_ancestor() -> int:
    """Return the oldest ancestor that this PID namespace shows."""
    pid = os.getpid()
    while (parent := _parent(pid)) > 0:
        pid = parent
    return pid


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
