"""`ringdraft lint`: what engines would misread in a checkpoint, one key a line."""

from pathlib import Path

from common.drafters.dflash.lint import lint
from common.errors import CheckpointError, ConfigError
from common.lifecycle import EXIT_CLEAN, EXIT_FAILED


def show_findings(checkpoint: Path) -> int:
    """Print what is found on stdout; the exit code says whether anything is."""
    try:
        found = lint(checkpoint)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    for finding in found:
        print(finding)  # noqa: T201
    if not found:
        print(f"{checkpoint}: no key that an engine would misread")  # noqa: T201
    return EXIT_FAILED if found else EXIT_CLEAN
