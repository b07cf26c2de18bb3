"""Two drafters on one stream: each has its own settings, checkpoints and figures; policies bound one."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import Process, make_run, run_to_end, segments_of, start, watched

SWEEP = """
[sweep.grid]
drafter.block_size = [2, 8]
[sweep.group.optimizer]
learning_rate = 3e-3
[held_out]
prompts = ["HELD_OUT"]
max_prompts = 3
max_new_tokens = 12
"""


@pytest.mark.timeout(300)
def test_a_sweep_trains_drafters_of_other_shapes_on_the_same_rows_and_compares_them(
    tmp_path: Path,
) -> None:
    config = make_run(tmp_path, num_conversations=60)
    grid = tmp_path / "grid.toml"
    grid.write_text(SWEEP.replace("HELD_OUT", str(tmp_path / "held_out.jsonl")))
    run = tmp_path / "run"
    with watched(run) as seen:
        done = run_to_end("services.launcher.cli", "sweep", grid, "--config", config)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert [d["group"] for d in line["drafters"]] == ["block_size-2", "block_size-8"]
    rows = line["rows_published"]
    for drafter, block_size in zip(line["drafters"], (2, 8), strict=True):
        assert drafter["settings"] == {"drafter.block_size": block_size}
        shape = json.loads((Path(drafter["checkpoint"]) / "config.json").read_text())
        assert shape["block_size"] == block_size
        run_json = json.loads((Path(drafter["checkpoint"]) / "run.json").read_text())
        assert run_json["config"]["optimizer"]["learning_rate"] == 3e-3
        # The target ran each row once, and both were trained on it.
        assert drafter["step"] == line["groups"][drafter["group"]]["rows_trained"] == rows > 10
        for figure in ("acceptance_length_after", "acceptance_length_held_out"):
            assert 1.0 <= drafter[figure] <= block_size
        assert drafter["loss"] > 0
        assert (run / "metrics" / f"{drafter['group']}-0.jsonl").read_text()
    target = json.loads((run / "target-0.summary.json").read_text())
    assert "sweep (* best)" in done.stderr
    assert line["best_drafter"]["by"] == "acceptance_length_best"
    assert target["captured_tokens"] <= rows * 128
    walked = {group["group"] for status in seen for group in status["groups"]
              if group["held_out_acceptance_length"]}  # fmt: skip
    assert walked == {"block_size-2", "block_size-8"}
    assert not segments_of(tmp_path)


class TwoGroups:
    """A target, a steady group's worker, and one of a group that a test stops."""

    def __init__(self, config: Path, policy: str, *more: str) -> None:
        self.run = config.parent / "run"
        self._config = config
        settings = (
            'groups.steady.policy="wait"', f'groups.late.policy="{policy}"',
            "groups.late.group_timeout_seconds=0.3", "ring.num_slots=4", "ring.capacity=1",
            "ring.lease_seconds=1.0", "ring.session_timeout_seconds=1.0",
            "training.checkpoint_steps=5", "training.log_steps=1",
            # A row is one step for both, and takes this one longer.
            "groups.late.training.visits=8", "groups.late.training.accumulation=8",
            *more,
        )  # fmt: skip
        self._options = [part for setting in settings for part in ("--set", setting)]
        self.processes: dict[str, Process] = {}
        self.start("target", "services.target_server")
        for group in ("steady", "late"):
            self.start(group, "services.drafter_worker", "--set", f"training.group={group}")

    def start(self, name: str, module: str, *options: str) -> None:
        log = self.run / "logs" / f"{name}.log"
        arguments = ("--config", self._config, *self._options, *options)
        self.processes[name] = start(module, *arguments, log=log)

    def step(self, group: str) -> int:
        path = self.run / "metrics" / f"{group}-0.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert self.processes["target"].poll() is None, self.logs()
            time.sleep(0.05)

    def wait_for_end(self, *names: str) -> None:
        for name in names:
            assert self.processes[name].wait(90) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in (self.run / "logs").iterdir())

    def account(self, group: str) -> dict[str, Any]:
        return json.loads((self.run / "target-0.summary.json").read_text())["groups"][group]


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[Callable[..., TwoGroups]]:
    made: list[TwoGroups] = []

    def make(policy: str, *more: str) -> TwoGroups:
        made.append(TwoGroups(make_run(tmp_path, num_conversations=100), policy, *more))
        return made[-1]

    yield make
    for groups in made:
        for process in groups.processes.values():
            process.kill()
            process.wait(60)


@pytest.mark.timeout(200)
def test_a_stopped_group_that_skips_holds_the_other_no_longer_than_its_time(
    two_groups: Callable[..., TwoGroups],
) -> None:
    groups = two_groups("skip")
    groups.wait_until(lambda: groups.step("late") >= 3)
    groups.processes["late"].send_signal(signal.SIGSTOP)
    groups.wait_for_end("steady")  # to its last row, while the other one is stopped
    groups.processes["late"].send_signal(signal.SIGCONT)
    groups.wait_for_end("late", "target")
    steady, late = groups.account("steady"), groups.account("late")
    assert steady["rows_trained"] == steady["rows_published"] == groups.step("steady") > 10
    assert steady["rows_skipped"] == steady["rows_lost"] == late["rows_lost"] == 0
    assert late["rows_skipped"] > 0
    assert late["rows_trained"] + late["rows_skipped"] == late["rows_published"]


@pytest.mark.timeout(200)
def test_a_stopped_group_that_waits_holds_the_other_and_skips_nothing(
    two_groups: Callable[..., TwoGroups],
) -> None:
    groups = two_groups("wait")
    groups.wait_until(lambda: groups.step("late") >= 3)
    groups.processes["late"].send_signal(signal.SIGSTOP)
    stopped_at = groups.step("late")
    time.sleep(2.0)  # six times what `skip` would wait
    # What was in the ring, and taken by the stopped one, is all that the other could get.
    held_at = groups.step("steady")
    assert held_at <= stopped_at + 4 + 3
    assert groups.processes["steady"].poll() is None
    groups.processes["late"].send_signal(signal.SIGCONT)
    groups.wait_for_end("steady", "late", "target")
    for group in ("steady", "late"):
        account = groups.account(group)
        assert account["rows_trained"] == account["rows_published"] > held_at
        assert account["rows_skipped"] == account["rows_lost"] == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("setting", "exit_code", "num_trained"),
    [("training.max_steps=5", 0, 5), ("optimizer.learning_rate=1e30", 1, 0)],
)
def test_a_group_that_trains_no_more_is_waited_for_no_longer(
    two_groups: Callable[..., TwoGroups], setting: str, exit_code: int, num_trained: int
) -> None:
    groups = two_groups("wait", f"groups.late.{setting}")
    assert groups.processes["late"].wait(90) == exit_code, groups.logs()
    groups.wait_for_end("steady", "target")
    steady, late = groups.account("steady"), groups.account("late")
    assert steady["rows_trained"] == steady["rows_published"] > 20
    assert late["rows_trained"] == num_trained
    assert late["rows_skipped"] == late["rows_published"] - num_trained
    assert late["rows_lost"] == late["rows_open"] == 0
