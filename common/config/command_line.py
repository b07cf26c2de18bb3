"""The one command line of every service: `--config` (repeatable), `--set a.b=c`, `--dry-run`."""

import argparse
from pathlib import Path
from typing import TypeVar

from common.config.loading import Table, describe, load

TableT = TypeVar("TableT", bound=Table)


def parse(model: type[TableT], service: str, arguments: list[str] | None = None) -> TableT | None:
    """Return the config, or None after `--dry-run` has printed it."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}", allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[], type=Path, metavar="FILE",
                        help="TOML file; repeatable, later files win")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="A.B=C",
                        help="one setting; repeatable")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and exit")
    options = parser.parse_args(arguments)
    config = load(model, options.config, options.settings)
    if options.dry_run:
        print(describe(config))  # noqa: T201
        return None
    return config
