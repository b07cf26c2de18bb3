"""Shared memory: who may open it, who may remove it, and what is said where it does not fit."""

import fcntl
import logging
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.contracts.ring_messages import SegmentRef
from common.errors import ConfigError, LayoutMismatchError, SegmentError
from common.ring import segment as segments
from common.ring.backings import attach
from common.ring.segment import HostSegment, MemorySegment, reclaim_dead_segments

NAME = f"ringdraft-unit-1-0123abcd-{1:016x}"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a folder of its own in /dev/shm, so that no other run's segments are there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rd-test-") as folder:
        monkeypatch.setattr(segments, "SEGMENT_DIRECTORY", Path(folder))
        yield Path(folder)


def ref_to(name: str, num_bytes: int = 4096) -> SegmentRef:
    return SegmentRef(backing="host", name=name, num_bytes=num_bytes, num_slots=1, owner_pid=1)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_owner_s_segment_is_private_whole_and_gone_at_close(place: Path) -> None:
    segment = HostSegment.create(NAME, 3, 4096)
    status = (place / NAME).stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == segment.ref.num_bytes == 3 * 4096
    assert status.st_blocks * 512 >= 3 * 4096  # every page is reserved
    segment.close()
    segment.close()
    assert list(place.iterdir()) == []


def test_what_a_writer_writes_a_reader_reads(place: Path) -> None:
    owner = HostSegment.create(NAME, 1, 4096)
    reader = attach(owner.ref)
    owner.slot(0).view[10:13] = b"abc"
    assert bytes(reader.slot(0).view[10:13]) == b"abc"
    reader.close()
    assert (place / NAME).exists()
    owner.close()


def test_a_name_that_is_taken_says_what_to_do(place: Path) -> None:
    (place / NAME).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"exists already.*remove the file"):
        HostSegment.create(NAME, 1, 4096)
    assert (place / NAME).read_bytes() == b"mine"


def test_a_ring_that_cannot_fit_says_how_much_it_needs_and_leaves_nothing(place: Path) -> None:
    status = os.statvfs(place)
    slot_bytes = (status.f_blocks * status.f_frsize // 4096 + 1) * 4096
    with pytest.raises(ConfigError) as raised:
        HostSegment.create(NAME, 4096, slot_bytes)
    for part in (str(4096 * slot_bytes), "ring.num_slots", "shm_size", "too small"):
        assert part in str(raised.value)
    assert list(place.iterdir()) == []


FORBIDDEN = """
import os, sys
from pathlib import Path
from common.errors import ConfigError
from common.ring import segment
segment.SEGMENT_DIRECTORY = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(4321)
segment.reclaim_dead_segments()
try:
    segment.HostSegment.create(sys.argv[2], 1, 4096)
except ConfigError as error:
    print(error)
"""


def test_a_folder_that_this_user_cannot_write_is_named_with_the_way_out(place: Path) -> None:
    """A dead ring of the same user lies there, and cannot be removed either."""
    other = NAME.replace("0123abcd", "1123abcd")
    (place / other).touch(0o600)
    if os.geteuid() == 0:
        os.chown(place / other, 4321, 4321)
    place.chmod(0o555)
    done = run_python(FORBIDDEN, str(place), NAME)
    place.chmod(0o700)
    assert done.returncode == 0, done.stderr
    for part in (
        f"{place / NAME}: Permission denied",
        "expected a tmpfs in which uid",
        "mode 1777",
    ):
        assert part in done.stdout
    assert f"{other} is left alone" in done.stderr


def test_whatever_the_kernel_has_against_the_file_is_an_error_of_the_config(place: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match=rf"{NAME}: Too many open files.*ulimit -n"):
            HostSegment.create(NAME, 1, 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert list(place.iterdir()) == []


LIMITED = """
import resource, signal, sys, threading
from pathlib import Path
from common.errors import ConfigError
from common.ring import segment
segment.SEGMENT_DIRECTORY = Path(sys.argv[1])
segment.PATIENCE_SECONDS = float(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
raise_limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
timer = threading.Timer(float(sys.argv[4]), raise_limit)
timer.start()
try:
    segment.HostSegment.create(sys.argv[2], 4, 4096).close()
    print("fits")
except ConfigError as error:
    print(error)
timer.cancel()
"""


@pytest.mark.parametrize(("patience", "freed_after", "said"), [("0.3", "30", "too small"), ("30", "0.3", "fits")])  # fmt: skip
def test_memory_that_comes_back_in_time_is_waited_for(
    place: Path, patience: str, freed_after: str, said: str
) -> None:
    done = run_python(LIMITED, str(place), NAME, patience, freed_after)
    assert said in done.stdout, done.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["../etc/passwd", f"{NAME}/..", f"sub/{NAME}", "ringdraft-", "other", f"{NAME}\0", "ringdraft-a b-1-2-3"],
    ids=repr,
)  # fmt: skip
def test_a_name_that_is_not_a_ring_s_is_refused(place: Path, name: str) -> None:
    with pytest.raises(LayoutMismatchError, match="not a ring's"):
        attach(ref_to(name))


def test_a_segment_of_another_size_is_refused(place: Path) -> None:
    (place / NAME).touch(0o600)
    (place / NAME).write_bytes(bytes(100))
    with pytest.raises(LayoutMismatchError, match="got 100 bytes, expected 4096"):
        attach(ref_to(NAME))
    (place / NAME).write_bytes(b"")
    with pytest.raises(LayoutMismatchError, match="got 0 bytes, expected 4096"):
        attach(ref_to(NAME))


def test_a_missing_or_linked_segment_is_not_opened(place: Path, tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="must share /dev/shm"):
        attach(ref_to(NAME))
    (tmp_path / "elsewhere").touch(0o600)
    (tmp_path / "elsewhere").write_bytes(bytes(4096))  # but for the link it could be a ring's
    (place / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        SegmentError, match=rf"{NAME}: got a link to '{tmp_path}/elsewhere'"
    ) as raised:
        attach(ref_to(NAME))
    assert "must share" not in str(raised.value)


def test_a_segment_that_was_removed_is_told_from_one_that_is_elsewhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = HostSegment.create(NAME, 1, 4096)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(segments, "SEGMENT_DIRECTORY", place / "not-shared")
        with pytest.raises(SegmentError, match="must share /dev/shm"):
            attach(owner.ref)
    (place / NAME).unlink()
    with pytest.raises(SegmentError, match=r"file was removed.*RemoveIPC.*a new ring"):
        attach(owner.ref)
    owner.close()


def test_a_gpu_ring_is_refused_by_a_worker_without_a_gpu() -> None:
    ref = SegmentRef(
        backing="cuda_ipc", name=NAME, num_bytes=4096, num_slots=1, owner_pid=1, gpu_uuid="GPU-1",
        handle=bytes(64),
    )  # fmt: skip
    with pytest.raises(SegmentError, match=r"GPU-1.*ring\.transport = 'host'"):
        attach(ref)


KILLED_OWNER = """
import os, signal, sys
from pathlib import Path
from common.ring import segment
segment.SEGMENT_DIRECTORY = Path(sys.argv[1])
segment.HostSegment.create(sys.argv[2], 2, 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_dead_owner_s_segment_is_reclaimed_and_its_bytes_are_logged(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_python(KILLED_OWNER, str(place), NAME)
    assert (place / NAME).exists()
    with caplog.at_level(logging.WARNING):
        assert reclaim_dead_segments() == 8192
    assert "8192 bytes" in caplog.text
    assert list(place.iterdir()) == []
    assert reclaim_dead_segments() == 0


def test_a_live_owner_s_segment_is_left_alone(place: Path) -> None:
    owner = HostSegment.create(NAME, 1, 4096)
    reader = attach(owner.ref)
    assert reclaim_dead_segments() == 0
    assert (place / NAME).exists()
    reader.close()
    assert reclaim_dead_segments() == 0
    owner.close()


def test_what_is_not_a_ring_s_file_is_left_alone(place: Path) -> None:
    (place / "ringdraft-notes").write_bytes(b"notes")
    (place / "something").write_bytes(b"else")
    (place / NAME).mkdir()
    os.mkfifo(place / NAME.replace("0123abcd", "1123abcd"))
    (place / NAME.replace("0123abcd", "2123abcd")).symlink_to(place / "something")
    before = set(place.iterdir())
    assert reclaim_dead_segments() == 0
    assert set(place.iterdir()) == before


def test_a_segment_is_never_taken_for_dead_while_it_is_made(place: Path) -> None:
    """Between creation and lock the file has no holder: another run's start must not win it."""
    done = threading.Event()

    def reclaim_for_ever() -> None:
        while not done.is_set():
            reclaim_dead_segments()

    rival = threading.Thread(target=reclaim_for_ever)
    rival.start()
    try:
        for _ in range(300):
            owner = HostSegment.create(NAME, 1, 4096)
            attach(owner.ref).close()
            owner.close()
    finally:
        done.set()
        rival.join()


def test_a_file_that_was_reclaimed_before_its_lock_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, opened = fcntl.flock, []

    def late_lock(descriptor: int, operation: int) -> None:
        if not opened:
            (place / NAME).unlink()
        opened.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(segments.fcntl, "flock", late_lock)
    owner = HostSegment.create(NAME, 1, 4096)
    assert len(opened) == 2
    assert (place / NAME).exists()
    owner.close()


def test_a_reader_sees_that_the_owner_is_gone(place: Path) -> None:
    owner = HostSegment.create(NAME, 1, 4096)
    reader = attach(owner.ref)
    assert not reader.is_removed()
    owner.close()
    assert reader.is_removed()
    reader.close()


def test_memory_that_is_viewed_stays_mapped_until_the_last_view_is_gone(place: Path) -> None:
    owner = HostSegment.create(NAME, 1, 4096)
    owner.slot(0).view[:3] = b"abc"
    lease = owner.slot(0).view[:100]
    owner.close()
    assert bytes(lease[:3]) == b"abc"
    assert NAME in Path("/proc/self/maps").read_text()
    del lease
    assert NAME not in Path("/proc/self/maps").read_text()


def test_a_memory_segment_is_found_by_its_name_until_its_owner_closes_it() -> None:
    owner = MemorySegment.create(NAME, 1, 4096)
    with pytest.raises(ConfigError):
        MemorySegment.create(NAME, 1, 4096)
    reader = attach(owner.ref)
    owner.slot(0).view[:3] = b"abc"
    assert bytes(reader.slot(0).view[:3]) == b"abc"
    reader.close()
    assert not reader.is_removed()
    owner.close()
    assert reader.is_removed()
    with pytest.raises(SegmentError):
        attach(owner.ref)
