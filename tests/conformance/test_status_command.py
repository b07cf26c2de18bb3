"""`ringdraft status` where a pipe, or a narrow terminal, leaves it 80 columns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.contracts.placement_messages import GpuClaim
from tests.control_planes import WATCHDOG_SECONDS, Line, Served
from tests.heartbeats import beat, evaluation, evaluator_report, target_report, worker_report
from tests.seekers import GIB, gpu

LONG = "a-name-that-has-all-the-forty-characters"
UUID = "GPU-8f2c1d4e-0000-1111-2222-333344445555"


def show(directory: Path, width: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "services.launcher.cli", "status", "--run", str(directory)],
        capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=True,
        # A proxy for the world outside is no way to a control plane of this machine.
        env={**os.environ, "COLUMNS": str(width), "http_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("group", ["main", LONG])
def test_every_figure_is_whole_at_80_columns(served: Served, line: Line, group: str) -> None:
    path = f"runs/demo/checkpoints/{group}/0/step-123456"
    report = worker_report(
        group=group, step=123_456, trained_rows=1_234_567, loss=12.3456, checkpoint=path, gpu_uuid=UUID,
        tokens_per_second=123_456.0,
    )  # fmt: skip
    claim = GpuClaim(gpus=(gpu(uuid=UUID),), num_bytes=GIB, held=UUID)
    line.ask(beat("target_server", 1, report=target_report()))
    line.ask(
        beat(
            "drafter_worker",
            2,
            instance=f"{group}-0",
            detail="step 123456",
            report=report,
            claim=claim,
        )
    )
    result = evaluation(checkpoint=path, step=123_456, acceptance_length=2.625)
    line.ask(beat("evaluator", 3, report=evaluator_report(results=(result,))))
    served.until(lambda status: status["evaluations"])
    text = show(served.directory, 80)
    assert all(len(row) <= 80 for row in text.splitlines()), text
    whole = text.split()
    heads = ["workers", "step", "rows", "skipped", "loss", "prefix", "accepted", "best", "held", "replay",
             "speed-up", "temperature", "free", "tok/s", "waits"]  # fmt: skip
    figures = ["123456", "1234567", "12.3456", "0.750", "2.625", "1.750", "1638", "0.5"]
    assert [part for part in (*heads, *figures) if part not in whole] == [], text
    assert all(len(row) < 5 for row in names_in(text)), "a name is folded, not spelled downwards"
    assert path in "".join(whole)


def names_in(text: str) -> list[list[str]]:
    """Return the lines that each row of the table of groups takes."""
    lines = text.partition("\ngroups")[2].partition("\nrings")[0].splitlines()
    rows: list[list[str]] = []
    for line in lines[3:]:
        if len(line.split()) > 1:
            rows.append([])
        rows[-1].append(line)
    return rows
