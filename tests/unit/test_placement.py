"""Which GPU a process gets, and why not another: the policy on records, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.loading import load
from common.config.shared import PlacementTable, TargetTable
from common.contracts.placement_messages import Gpu, GpuClaim, GpuGrant, GpuRefusal
from common.drafters.dflash.config import DrafterTable, resolve_spec
from common.drafters.dflash.footprint import num_parameters, worker_bytes
from common.errors import ConfigError
from common.placement.policy import Holder, PlacementPolicy, free_bytes
from common.placement.visible import visible_gpus
from common.target.footprint import measure_target
from common.target.loading import describe_target, load_target
from services.control_plane.config import ControlPlaneConfig
from tests.drafters import make_drafter
from tests.seekers import GIB, describe, gpu
from tests.targets import make_tiny_target


def choose(
    gpus: list[Gpu], *holders: Holder, service: str = "drafter_worker", num_bytes: int = GIB,
    locked: tuple[str, ...] = (), **table,
) -> str:  # fmt: skip
    """Return the UUID that is granted, or the reason of the refusal."""
    claim = GpuClaim(gpus=tuple(gpus), num_bytes=num_bytes, locked=locked)
    answer = PlacementPolicy(PlacementTable(**table)).choose(service, claim, holders)
    return answer.gpu_uuid if isinstance(answer, GpuGrant) else answer.reason


def worker(uuid: str, name: str = "main-0", num_bytes: int = GIB) -> Holder:
    return Holder("drafter_worker", name, uuid, num_bytes)


def target(uuid: str) -> Holder:
    return Holder("target_server", "target-0", uuid, GIB)


def test_a_single_gpu_is_shared_by_target_and_workers() -> None:
    held = [target("GPU-0000"), worker("GPU-0000")]
    assert choose([gpu(0)], *held) == "GPU-0000"


def test_workers_go_where_fewest_leases_are_then_to_the_most_free_memory() -> None:
    gpus = [gpu(0), gpu(1, free_bytes=60 * GIB), gpu(2, free_bytes=90 * GIB)]
    assert choose(gpus) == "GPU-0000"
    assert choose(gpus, target("GPU-0000")) == "GPU-0002"
    assert choose(gpus, target("GPU-0000"), worker("GPU-0002")) == "GPU-0001"


def test_one_that_was_placed_a_moment_ago_counts_by_its_estimate() -> None:
    first = gpu(0, total_bytes=40 * GIB, free_bytes=39 * GIB)  # the driver still shows it as free
    held = worker("GPU-0000", num_bytes=30 * GIB)
    assert free_bytes(first, [held]) == 10 * GIB
    reason = choose([first], held, num_bytes=11 * GIB)
    assert "GPU-0000 (0, H200) has 10.0 GiB free of the 11.0 GiB that it takes" in reason
    assert choose([first], held, num_bytes=10 * GIB) == "GPU-0000"
    assert choose([first], held, num_bytes=11 * GIB, check_memory=False) == "GPU-0000"


def test_a_full_gpu_is_refused_with_who_is_there_and_what_to_change() -> None:
    held = [worker("GPU-0000", f"main-{index}") for index in range(2)]
    reason = choose([gpu(0)], *held, workers_per_gpu=2)
    assert "GPU-0000 (0, H200) has 2 of 2 workers (main-0, main-1)" in reason
    assert "raise placement.workers_per_gpu" in reason
    assert choose([gpu(0)], *held, workers_per_gpu=3) == "GPU-0000"
    # The limit is one of workers.
    assert choose([gpu(0)], *held, workers_per_gpu=2, service="evaluator") == "GPU-0000"


@pytest.mark.parametrize("entry", [0, "GPU-0000", "GPU-000"])
def test_reserved_gpus_are_for_targets(entry: int | str) -> None:
    gpus, table = [gpu(0), gpu(0x10)], {"reserved_for_targets": (entry,)}
    for service in ("drafter_worker", "evaluator"):
        assert choose(gpus, service=service, **table) == "GPU-0010"
        reason = choose(gpus[:1], service=service, **table)
        assert "is kept for targets" in reason
        assert "placement.reserved_for_targets" in reason
    assert choose(gpus, worker("GPU-0000"), service="target_server", **table) == "GPU-0000"


def test_targets_take_reserved_gpus_first_and_then_apart_from_one_another() -> None:
    gpus = [gpu(index) for index in range(3)]
    assert choose(gpus, service="target_server", reserved_for_targets=(2,)) == "GPU-0002"
    held = [
        target("GPU-0000"),
        worker("GPU-0001"),
        worker("GPU-0001", "main-1"),
        target("GPU-0002"),
    ]
    assert choose(gpus, *held, service="target_server") == "GPU-0001"


def test_a_gpu_in_mig_mode_is_no_place_and_its_devices_are() -> None:
    whole = gpu(0, is_in_parts=True)
    parts = [gpu(0, uuid=f"MIG-{n}", parent="GPU-0000", total_bytes=20 * GIB, free_bytes=20 * GIB)
             for n in range(2)]  # fmt: skip
    assert choose([whole, *parts], worker("MIG-0")) == "MIG-1"
    assert "is in MIG mode" in choose([whole])
    assert "is kept for targets" in choose([whole, *parts], reserved_for_targets=("GPU-0000",))
    assert "has 20.0 GiB free" in choose(parts, num_bytes=21 * GIB)


def test_a_place_whose_lock_is_held_is_passed_over() -> None:
    assert choose([gpu(0), gpu(1)], locked=("GPU-0000",)) == "GPU-0001"
    assert "locked by processes of which nothing is heard" in choose([gpu(0)], locked=("GPU-0000",))


@given(
    limit=st.integers(1, 3), num_gpus=st.integers(1, 4), num_workers=st.integers(0, 14),
    free=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)  # fmt: skip
def test_no_gpu_gets_more_workers_or_bytes_than_it_has_room_for(
    limit: int, num_gpus: int, num_workers: int, free: list[int]
) -> None:
    gpus = [gpu(i, total_bytes=8 * GIB, free_bytes=free[i] * GIB) for i in range(num_gpus)]
    policy = PlacementPolicy(PlacementTable(workers_per_gpu=limit))
    claim = GpuClaim(gpus=tuple(gpus), num_bytes=2 * GIB)
    holders: list[Holder] = []
    for number in range(num_workers):
        answer = policy.choose("drafter_worker", claim, holders)
        if isinstance(answer, GpuRefusal):
            break
        holders.append(worker(answer.gpu_uuid, f"main-{number}", 2 * GIB))
    for each in gpus:
        mine = [holder for holder in holders if holder.gpu_uuid == each.uuid]
        assert len(mine) <= limit
        assert not mine or each.free_bytes >= 2 * GIB
        assert 2 * GIB * len(mine) <= each.total_bytes
    room = sum(min(limit, 4) for each in gpus if each.free_bytes >= 2 * GIB)
    assert len(holders) == min(room, num_workers)


MACHINE = (
    gpu(0), gpu(1, uuid="GPU-00ff", is_in_parts=True),
    gpu(1, uuid="MIG-aa", parent="GPU-00ff"), gpu(1, uuid="MIG-ab", parent="GPU-00ff"), gpu(2),
)  # fmt: skip
ALL = ["GPU-0000", "GPU-00ff", "MIG-aa", "MIG-ab", "GPU-0002"]


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ALL),
        ("", []),
        ("2,0", ["GPU-0002", "GPU-0000"]),
        ("1", ALL[1:4]),
        ("GPU-00ff", ALL[1:4]),
        ("GPU-0002", ["GPU-0002"]),
        ("GPU-000", []),  # of two
        ("GPU-00f, 0", [*ALL[1:4], "GPU-0000"]),
        ("MIG-ab,MIG-aa", ["MIG-ab", "MIG-aa"]),
        ("0,-1,2", ["GPU-0000"]),
        ("0,7,2", ["GPU-0000"]),
        ("0,0", ["GPU-0000"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(variable: str | None, uuids: list[str]) -> None:
    assert [each.uuid for each in visible_gpus(MACHINE, variable)] == uuids


def read_in_a_process(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = (
        "import json; from common.placement.nvml import read_gpus; "
        "print(json.dumps([gpu.model_dump() for gpu in read_gpus()]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


def test_nvml_is_read_with_mig_devices_behind_their_gpu(tmp_path: Path) -> None:
    part = {"uuid": "MIG-aa", "name": "H200 MIG 1g.18gb", "total": 18 * GIB, "free": 17 * GIB}
    plain = {"uuid": "GPU-0000", "name": "H200", "total": 140 * GIB, "free": 139 * GIB}
    gpus = [plain | {"mig": {}}, plain | {"uuid": "GPU-0001", "mig": {"3": part}}, plain]
    done = read_in_a_process(describe(tmp_path, gpus))
    assert done.returncode == 0, done.stderr
    found = [Gpu.model_validate(each) for each in json.loads(done.stdout)]
    assert [(each.uuid, each.index, each.parent, each.is_in_parts) for each in found] == [
        ("GPU-0000", 0, "", False), ("GPU-0001", 1, "", True), ("MIG-aa", 1, "GPU-0001", False),
        ("GPU-0000", 2, "", False),
    ]  # fmt: skip
    assert (found[2].name, found[2].free_bytes) == ("H200 MIG 1g.18gb", 17 * GIB)


def test_without_a_driver_the_error_says_what_to_do(tmp_path: Path) -> None:
    environment = describe(tmp_path, [])
    del environment["FAKE_NVML"]
    done = read_in_a_process(environment)
    assert "no NVIDIA driver answers: Driver Not Loaded" in done.stderr
    assert "deploy.resources.reservations.devices" in done.stderr


@pytest.mark.parametrize("value", ["true", "-1", "'0'", "'H200'", "1.5"])
def test_a_reserved_gpu_must_be_an_index_or_a_uuid(value: str) -> None:
    with pytest.raises(ConfigError, match=r"placement\.reserved_for_targets"):
        load(ControlPlaneConfig, [], [f"placement.reserved_for_targets=[{value}]"], environment={})


def test_settings_come_from_the_environment_too() -> None:
    table = load(
        ControlPlaneConfig, [], [],
        environment={
            "RINGDRAFT_PLACEMENT__WORKERS_PER_GPU": "2",
            "RINGDRAFT_PLACEMENT__RESERVED_FOR_TARGETS": '[0, "MIG-aa"]',
        },
    ).placement  # fmt: skip
    assert (table.workers_per_gpu, table.reserved_for_targets) == (2, (0, "MIG-aa"))


def test_target_and_drafter_are_measured_by_files_and_settings_alone(tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target")
    table = TargetTable(model=str(tmp_path / "target"), num_aux_layers=2)
    model = load_target(table, "cpu")
    size = measure_target(table)
    assert size.weight_bytes == 2 * sum(p.numel() for p in model.parameters())
    assert (size.hidden_size, size.vocab_size) == tuple(model.get_input_embeddings().weight.shape)[
        ::-1
    ]
    assert size.row_bytes(128) == 2 * 128 * 2 * size.hidden_size
    drafter_table = DrafterTable(num_layers=3)
    spec = resolve_spec(
        drafter_table, describe_target(table), target_layer_ids=(1, 3), mask_token_id=299
    )
    drafter = make_drafter(spec)
    matrices = sum(p.numel() for p in drafter.parameters() if p.ndim == 2)
    assert num_parameters(drafter_table, size) == matrices
    assert worker_bytes(drafter_table, size) > 16 * matrices + size.table_bytes


def test_what_files_do_not_say_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "target.gguf").touch()
    assert measure_target(TargetTable(model=str(tmp_path / "target.gguf"))).weight_bytes == 0
