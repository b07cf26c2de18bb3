"""What else may lie in /dev/shm, and a /dev/shm that is full."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from common.ring.segment import HostSegment
from tests.ring_scene import ROWS, Scene

ROOT = Path(__file__).parents[2]
NAME = "ringdraft-fault-1-0123abcd-" + "0" * 15
"""All but the last digit of a ring's name."""


def put(path: Path, mode: int = 0o600, uid: int = -1) -> None:
    path.write_bytes(b"another program's")
    path.chmod(mode)
    os.chown(path, uid, uid)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "ringdraft": put,
    "ringdraft-": put,
    "ringdraft-notes.txt": put,
    "ringdraft-fault-1-0123abcd-00": put,
    "ringdraft-fault-1-0123abcd-000000000000000g": put,
    f"{NAME}0.old": put,
    f"x{NAME}0": put,
    f"{NAME}1": lambda path: path.mkdir(),
    f"{NAME}2": lambda path: os.mkfifo(path, 0o600),
    f"{NAME}3": lambda path: path.symlink_to(path.with_name("ringdraft")),
    f"{NAME}4": lambda path: path.symlink_to("/etc/passwd"),
    f"{NAME}5": lambda path: put(path, 0o644),
    **({f"{NAME}6": lambda path: put(path, uid=4321)} if os.geteuid() == 0 else {}),
}


def test_a_start_reclaims_what_dead_owners_left_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Foreign files of any kind, a live owner's segment, and three dead owners' lie there."""
    monkeypatch.setattr("common.ring.segment.SEGMENT_DIRECTORY", scene.shared_memory)
    for name, make in FOREIGN.items():
        make(scene.shared_memory / name)
    alive = HostSegment.create(f"{NAME}7", 2, 4096)
    before = look_at(scene.shared_memory)
    scene.start("owner", "owner", num_rows=ROWS)
    scene.wait_for("owner", "ready")
    scene.signal("owner", signal.SIGKILL)
    for name in (f"{NAME}8", f"{NAME}9".replace("fault", "another-run")):
        put(scene.shared_memory / name)
    dead = [name for name in scene.segments() if name not in before]
    assert len(dead) == 3
    num_bytes = sum((scene.shared_memory / name).stat().st_size for name in dead)
    scene.start("owner", "owner", num_rows=ROWS)
    scene.start("worker", "worker")
    scene.wait_for_end("owner", "worker")
    scene.assert_nothing_is_lost()
    assert scene.log("owner", "reclaimed")[-1]["num_bytes"] == num_bytes
    assert look_at(scene.shared_memory) == before
    alive.close()
    for name in FOREIGN:
        path = scene.shared_memory / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def look_at(place: Path) -> dict[str, tuple[int, ...]]:
    found = {path.name: path.lstat() for path in place.iterdir()}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode) for name, s in found.items()}


SMALL = """
import sys, tempfile, threading
from pathlib import Path
from common.errors import ConfigError
from common.ring import segment
from common.ring.owner import RingOwner
from tests.rings import Reader, make_groups, make_schema, make_table, publish

SHM, (case, patience) = Path("/dev/shm"), sys.argv[1:]
assert not list(SHM.iterdir())
segment.PATIENCE_SECONDS = float(patience)
ballast = SHM / "ballast"

def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            print("filled:", error.strerror)

def run(num_slots):
    endpoint = Path(tempfile.mkdtemp(prefix="rd-")) / "s"
    with RingOwner(endpoint=endpoint, run="small", schema=make_schema(), groups=make_groups(),
                   table=make_table(num_slots=num_slots)) as owner:
        if case == "filled later":
            fill()
        reader = Reader(endpoint, "w")
        for sequence in range(3 * num_slots):
            publish(owner, sequence)
            assert reader.next_row() == sequence
        reader.close()

if case in ("filled before", "freed in time"):
    fill()
if case == "freed in time":
    threading.Timer(0.3, ballast.unlink).start()
try:
    run(1000 if case == "too small" else 16)
    print("served")
except ConfigError as error:
    print(error)
ballast.unlink(missing_ok=True)
print("left:", [path.name for path in SHM.iterdir()])
"""
MOUNTED = 'mount -t tmpfs -o size=1m,mode=1777{options} tmpfs /dev/shm && exec "$@"'
CASES = {
    "too small": ("0", ["too small: 1000 slots", "1048576", "ring.num_slots", "shm_size"]),
    "filled before": ("0.2", ["filled: No space left", "got 0 free of 1048576", "ring.num_slots"]),
    "freed in time": ("60", ["filled: No space left", "served"]),
    "filled later": ("0", ["filled: No space left", "served"]),
}


def unshare(options: str = "") -> list[str]:
    """Return a command that runs another with a mount namespace of its own, or skip the test."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        if shutil.which("unshare"):
            mounted = [*command, "sh", "-c", MOUNTED.format(options=options), "sh"]
            if subprocess.run([*mounted, "true"], capture_output=True).returncode == 0:
                return mounted
    pytest.skip("no mount namespaces here (test_ring_segment limits a file's size instead)")


@pytest.mark.parametrize("case", CASES)
def test_a_ring_in_a_small_shared_memory_serves_or_says_what_it_needs(case: str) -> None:
    """In a /dev/shm of 1 MiB of its own. A ring that stands has its pages: no SIGBUS comes."""
    patience, expected = CASES[case]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SMALL)
        script.flush()
        done = subprocess.run(
            [*unshare(), sys.executable, script.name, case, patience],
            cwd=ROOT, capture_output=True, text=True, timeout=100,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in (*expected, "left: []"):
        assert part in done.stdout, done.stdout


REFUSED = {
    ",ro": ["Read-only file system", "mount it for writing"],
    ",nr_inodes=1": ["No space left on device", "no inode is left", "nr_inodes"],
}
STARTED = """
import sys
from pathlib import Path
from common.lifecycle import run_service
from common.ring.owner import RingOwner
from tests.rings import make_groups, make_schema, make_table

def main(stop):
    RingOwner(endpoint=Path(sys.argv[1]) / "s", run="refused", schema=make_schema(),
              groups=make_groups(), table=make_table())

sys.exit(run_service(main))
"""


@pytest.mark.parametrize("options", REFUSED)
def test_a_shared_memory_that_takes_no_file_is_named_with_the_way_out(
    options: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*unshare(options), sys.executable, "-c", STARTED, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for part in ("/dev/shm/ringdraft-refused-", *REFUSED[options]):
        assert part in done.stderr
