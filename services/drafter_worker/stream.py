"""What the run directory says of a target server that does not answer."""

import json
from pathlib import Path

from common.lifecycle import lock_holder

TARGET_LOCK = "target-0.lock"
TARGET_SUMMARY = "target-0.summary.json"


def stream_is_over(run_directory: Path) -> bool:
    """Whether the target server has ended with every row committed: nothing is left to train."""
    try:
        summary = json.loads((run_directory / TARGET_SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary.get("is_drained")) and lock_holder(run_directory / TARGET_LOCK) is None
