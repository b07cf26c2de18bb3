"""Workers of one group that come, leave, die and stop: the others go on, with equal weights."""

import random
import signal
from pathlib import Path

import pytest

from common.quorum import is_installed
from tests.groups import GroupRun

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="torchft (extra sync) is not installed"),
    pytest.mark.timeout(300),
]
both = pytest.mark.parametrize("sync", ["allreduce", "local_sgd"])


@both
def test_a_killed_worker_is_missed_no_longer_than_its_lease_and_one_who_joins_is_healed(
    tmp_path: Path, sync: str
) -> None:
    with GroupRun(tmp_path, sync) as run:
        run.start_workers("a", "b")
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        run.signal("b", signal.SIGKILL)
        run.wait_for_exchanges("a", 3)
        run.start_workers("c")
        run.wait_until(lambda: "healed by member" in run.log("c"), "c is healed")
        run.wait_for_exchanges("c", 2)
        run.wait_for_end("a", "c")
        run.assert_whole("a", "b", "c")


@both
def test_a_worker_stopped_past_its_lease_comes_back_to_the_weights_of_the_others(
    tmp_path: Path, sync: str
) -> None:
    with GroupRun(tmp_path, sync) as run:
        run.start_workers("a", "b")
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        run.signal("b", signal.SIGSTOP)
        stopped_at = run.num_exchanges("b")
        run.wait_for_exchanges("a", 3)
        assert run.num_exchanges("b") == stopped_at
        healed = run.log("b").count("healed by member")
        run.signal("b", signal.SIGCONT)
        run.wait_until(lambda: run.log("b").count("healed by member") > healed, "b is healed")
        run.wait_for_end("a", "b")
        run.assert_whole("a", "b")


@both
def test_a_worker_stopped_until_the_last_other_has_left_goes_on_from_its_checkpoint(
    tmp_path: Path, sync: str
) -> None:
    with GroupRun(tmp_path, sync) as run:
        run.start_workers("a", "b")
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        run.signal("a", signal.SIGSTOP)
        run.wait_for_exchanges("b", 3)
        run.signal("b", signal.SIGTERM)
        run.wait_for_end("b")
        left = run.state()
        run.signal("a", signal.SIGCONT)
        run.wait_for_end("a")
        assert "goes on from" in run.log("a")
        assert run.state()["trained_rows"] > left["trained_rows"] > 0
        run.assert_whole("a", "b")


def test_a_worker_that_leaves_has_its_rows_in_a_checkpoint_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    with GroupRun(tmp_path, "allreduce") as run:
        run.start_workers("a", "b")
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        saved = run.num_saved("ab")
        run.signal("b", signal.SIGTERM)
        run.wait_for_end("b")
        # One holds its rows; exchanges of the others alone do not keep it.
        assert run.num_saved("ab") <= saved + 8
        assert run.trained("b") <= run.contained()
        run.wait_for_end("a")
        run.assert_whole("a", "b")
        assert run.state()["trained_rows"] == run.account()["rows_published"], (
            "none is trained twice"
        )


def test_a_group_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    with GroupRun(tmp_path, "local_sgd") as run:
        run.start_workers("a", "b")
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        for name in "ab":
            run.signal(name, signal.SIGTERM)
        run.wait_for_end("a", "b")
        step = run.state()["step"]
        assert step > 0
        # None is settled before all have heard of the checkpoint: it lists each member's rows itself.
        assert run.trained("a") | run.trained("b") == run.contained()
        run.start_workers("c")
        run.wait_for_end("c")
        assert run.weights("c")[0]["step"] > step
        run.assert_whole("a", "b", "c")


def test_a_quorum_server_that_dies_is_waited_for_and_the_group_goes_on(tmp_path: Path) -> None:
    with GroupRun(tmp_path, "allreduce") as run:
        run.start_workers("a", "b")
        run.wait_until(lambda: min(map(run.num_exchanges, "ab")) >= 2, "both exchange")
        run.signal("quorum", signal.SIGKILL)
        run.start("services.quorum_server", "quorum")
        for name in "ab":
            run.wait_for_exchanges(name, 2)
        run.wait_for_end("a", "b")
        run.assert_whole("a", "b")


def test_a_worker_of_another_config_is_refused_by_name_and_the_group_goes_on(
    tmp_path: Path,
) -> None:
    with GroupRun(tmp_path, "allreduce") as run:
        run.start_workers("a")
        run.wait_for_exchanges("a", 2)
        run.start_workers("b", settings=("optimizer.learning_rate=0.5",))
        assert run.processes["b"].wait(100) == 2, run.tails()
        assert "optimizer.learning_rate got 0.5, expected 0.01" in run.log("b")
        run.wait_for_end("a")
        run.assert_whole("a")


def is_running(run: GroupRun, name: str) -> bool:
    return run.processes[name].poll() is None


def inflict(run: GroupRun, fault: str, victim: str, newcomer: str) -> None:
    """Do one thing to the group."""
    signals = {"kill": signal.SIGKILL, "leave": signal.SIGTERM, "stop": signal.SIGSTOP}
    if fault == "join":
        run.start_workers(newcomer)
    else:
        run.signal(victim, signals[fault])


def wait_for_others(run: GroupRun, others: list[str], count: int) -> None:
    """Wait until some have made so many exchanges more, or one of them has ended."""
    wanted = sum(map(run.num_exchanges, others)) + count

    def is_enough() -> bool:
        has_ended = not all(is_running(run, name) for name in [*others, "target"])
        return has_ended or sum(map(run.num_exchanges, others)) >= wanted

    run.wait_until(is_enough, "the others go on")


def disturb(run: GroupRun, chooser: random.Random, num_faults: int) -> list[str]:
    """Kill, stop, send away and add workers at random; return the names of all."""
    names = ["w0", "w1"]
    run.start_workers(*names)
    wait_for_others(run, ["w0"], 1)
    for number in range(num_faults):
        running = [name for name in names if is_running(run, name)]
        if not is_running(run, "target"):
            break
        fault = chooser.choice(["kill", "stop", "leave", "join"]) if len(running) > 1 else "join"
        victim, newcomer = chooser.choice([*running, ""]), f"j{number}"
        fault = fault if victim else "join"
        inflict(run, fault, victim, newcomer)
        names += [newcomer] * (fault == "join")
        others = [name for name in names if is_running(run, name) and name != victim]
        wait_for_others(run, others, chooser.randrange(1, 4))
        if fault == "stop":
            run.signal(victim, signal.SIGCONT)
    return names


@pytest.mark.hammer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(50))
@both
def test_any_schedule_of_faults_ends_with_every_row_in_equal_weights(
    tmp_path: Path, sync: str, seed: int
) -> None:
    with GroupRun(tmp_path, sync) as run:
        names = disturb(run, random.Random(seed), num_faults=6)
        if is_running(run, "target"):
            run.start_workers("last")
            names.append("last")
        run.assert_whole(*names)
