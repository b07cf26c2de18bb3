"""A run that is killed as a whole goes on with another number of workers."""

import json
import signal
from pathlib import Path

import pytest

from common.quorum import is_installed
from tests.groups import GroupRun
from tests.runs import segments_of
from tests.series import newest_of, state_of

pytestmark = pytest.mark.timeout(300)
needs_torchft = pytest.mark.skipif(
    not is_installed(), reason="torchft (extra sync) is not installed"
)
OFTEN = ("training.checkpoint_steps=4",)


def rows_in(checkpoint: Path) -> set[int]:
    consumed = state_of(checkpoint)["consumed"]
    return {*range(consumed["low"]), *consumed["above"]}


def committed(run: GroupRun) -> dict[int, set[int]]:
    """Return the rows of each series' newest checkpoint."""
    series = (run.directory / "checkpoints" / "main").glob("[0-9]*")
    indexes = sorted(int(path.name) for path in series if list(path.glob("step-*")))
    return {index: rows_in(newest_of(run.directory, index)) for index in indexes}


def kill_all(run: GroupRun, *workers: str) -> None:
    for name in (*workers, "target"):
        run.signal(name, signal.SIGKILL)


@pytest.mark.parametrize(
    ("sync", "before", "after"),
    [
        ("none", "ab", "c"),
        ("none", "a", "bc"),
        pytest.param("allreduce", "ab", "c", marks=needs_torchft),
        pytest.param("allreduce", "a", "bc", marks=needs_torchft),
        pytest.param("local_sgd", "ab", "c", marks=needs_torchft),
        pytest.param("local_sgd", "a", "bc", marks=needs_torchft),
    ],
)
def test_every_row_is_trained_once_on_what_survives(
    tmp_path: Path, sync: str, before: str, after: str
) -> None:
    num_series = len(before) if sync == "none" else 1
    with GroupRun(tmp_path, sync) as run:
        run.start_workers(*before, settings=OFTEN)
        run.wait_until(
            lambda: len(found := committed(run)) == num_series and all(found.values()),
            "each series has a checkpoint with rows",
        )
        kill_all(run, *before)
        kept = committed(run)
        run.start("services.target_server", "target")
        run.start_workers(*after, settings=OFTEN)
        run.wait_for_end(*after, "target")
        found, account = committed(run), run.account()
        trained = json.loads(
            (newest_of(run.directory) / "trainer" / "state.json").read_text()
        )["trained_rows"]  # fmt: skip
        lines = (run.directory / "metrics" / "main-0.jsonl").read_text().splitlines()
        digests: dict[int, set[str]] = {}
        for name in before + after:
            for entry in run.weights(name):
                digests.setdefault(entry["lineage"], set()).add(entry["digest"])
    everything = set().union(*found.values())
    total = len(everything)
    assert everything == set(range(total))
    assert total > 30
    assert all(kept[index] <= found[index] for index in kept), "nothing that was durable is lost"
    assert account["rows_lost"] == account["rows_open"] == 0
    assert account["rows_published"] == total - len(set().union(*kept.values())), "and none again"
    assert any(json.loads(line).get("is_resumed") for line in lines)
    assert all(len(same) == 1 for same in digests.values()), "weights of one lineage are equal"
    if sync != "none":
        again = account["requeued"] + account["recaptured"]
        assert total <= trained <= total + again
    assert not segments_of(tmp_path)
