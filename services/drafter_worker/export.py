"""`python -m services.drafter_worker.export`: copy a checkpoint into a layout that engines load.

Prints one JSON line: the folder, the layout and the files with their bytes.
"""

import json
import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import RunTable, TargetTable
from common.errors import CheckpointError, ConfigError
from common.lifecycle import heavy_imports, run_service
from common.telemetry import logs

if TYPE_CHECKING:
    from common.drafters.dflash.config import DrafterSpec
    from common.drafters.dflash.speculators import TargetReference

_log = logging.getLogger(__name__)


class ExportTable(Table):
    """[export]: what to copy, how, and where to."""

    checkpoint: Path
    """Folder of a checkpoint in the z-lab layout, of a run or of another trainer."""
    to: Literal["zlab", "speculators"]
    """The layout: `zlab` for SGLang, vLLM and transformers, `speculators` for that library and vLLM."""
    out: Path
    """Folder to write; it must not be there, or be empty."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Element type of the weights."""
    target: str = ""
    """For `speculators`: the target's hub id or folder, as readers find it; empty takes the run's."""


class ExportConfig(Table):
    """What `python -m services.drafter_worker.export` reads."""

    run: RunTable = RunTable()
    export: ExportTable


def run(table: ExportTable) -> list[Path]:
    """Write the folder and return its files."""
    with heavy_imports():  # only after a config that holds
        from common.drafters.dflash.checkpoint import read_spec
        from common.drafters.dflash.export import export

    try:
        target = None
        if table.to == "speculators":
            target = find_target(table, read_spec(table.checkpoint))
        return export(table.checkpoint, table.out, table.to, table.dtype, target)
    except CheckpointError as error:  # told to whoever named the checkpoint, without a trace
        raise ConfigError(str(error)) from error


def find_target(table: ExportTable, spec: "DrafterSpec") -> "TargetReference":
    """Return what a reader needs of the target; raise `ConfigError` where it is not the drafter's."""
    from common.drafters.dflash.speculators import TargetReference
    from common.target.files import locate
    from common.target.loading import describe_target

    trained_with = _origin(table.checkpoint)
    name = table.target or trained_with.get("model", "")
    if not name:
        raise ConfigError(
            f"checkpoint {str(table.checkpoint)!r} does not say which target it is of; give its hub "
            f"id or folder with --target"
        )
    files = locate(TargetTable(model=name))
    if files.gguf_name:
        raise ConfigError(
            f"--target {name!r}: got a GGUF file, expected a folder or hub id: readers of the "
            f"speculators layout take embedding and head from safetensors"
        )
    target = describe_target(TargetTable(model=name))
    misfits = spec.misfits(target)
    if misfits:
        raise ConfigError(
            f"checkpoint {str(table.checkpoint)!r} belongs to another target than {name!r}: "
            f"{'; '.join(misfits)}; give its own with --target"
        )
    if trained_with.get("fingerprint", target.fingerprint) != target.fingerprint:
        _log.warning(
            "checkpoint %s was trained with target %s, %s is %s of the same shape",
            table.checkpoint, trained_with["fingerprint"], name, target.fingerprint,
        )  # fmt: skip
    config = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))
    # A reader has another working directory; a hub id stays one.
    found_at = str(files.folder) if Path(name).expanduser().is_dir() else name
    return TargetReference(found_at, tuple(config.get("architectures") or ()))


def _origin(checkpoint: Path) -> dict[str, str]:
    """Return the target's name and fingerprint in run.json, as far as it has them."""
    try:
        content = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
        found = {
            "model": content["config"]["target"]["model"],
            "fingerprint": content["target_fingerprint"],
        }
    except (OSError, ValueError, KeyError, TypeError):  # of another trainer
        return {}
    return found


def main(stop: threading.Event) -> None:
    """Export what the config names."""
    del stop
    config = parse(ExportConfig, "drafter_worker.export")
    if config is None:
        return
    logs.configure("drafter_worker", "export", config.run.name, config.run.log_level)
    files = run(config.export)
    summary = {
        "directory": str(config.export.out),
        "layout": config.export.to,
        "files": {path.name: path.stat().st_size for path in files},
    }
    print(json.dumps(summary))  # noqa: T201


if __name__ == "__main__":
    sys.exit(run_service(main))
