"""Asks each service whether it accepts its config, before any of them starts."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError, RingdraftError
from common.lifecycle import EXIT_CONFIG
from services.launcher.process import ServiceSpec

_TIMEOUT_SECONDS = 300.0


def check(specs: Sequence[ServiceSpec]) -> dict[str, Any]:
    """Return the resolved config of each service, or raise what the first refusal says."""
    # One of a kind is enough where commands are equal, such as for replicas of a worker.
    distinct = {spec.command: spec for spec in specs}
    children = [(spec, _start(spec)) for spec in distinct.values()]
    resolved, refusals = {}, []
    for spec, child in children:
        out, err = child.communicate(timeout=_TIMEOUT_SECONDS)
        if child.returncode:
            refusals.append((spec, child.returncode, err.strip()))
        else:
            resolved[spec.name] = json.loads(out)
    if refusals:
        _raise(refusals)
    return resolved


def _start(spec: ServiceSpec) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        (*spec.command, "--dry-run"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _raise(refusals: list[tuple[ServiceSpec, int, str]]) -> None:
    """Show each distinct complaint once: services share tables, and so their errors."""
    by_text: dict[str, list[str]] = {}
    for spec, _, text in refusals:
        by_text.setdefault(text, []).append(spec.name)
    complaint = "\n".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())
    if all(code == EXIT_CONFIG for _, code, _ in refusals):
        raise ConfigError(complaint)
    raise RingdraftError(f"--dry-run failed\n{complaint}")
