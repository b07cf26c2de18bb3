"""Reads what must not be in a config file, a command line or a run's records."""

import os

from common.config.loading import ENVIRONMENT_PREFIX
from common.errors import ConfigError


def read_secret(variable: str) -> str:
    """Return an environment variable's value without blanks around it; empty where it is unset."""
    if variable.startswith(ENVIRONMENT_PREFIX):
        raise ConfigError(
            f"a secret in {variable!r}: variables that begin with {ENVIRONMENT_PREFIX} are settings "
            f"and are written to the run's records; use another name"
        )
    return os.environ.get(variable, "").strip()
