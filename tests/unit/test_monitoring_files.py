"""Dashboard and alerts ask for metrics that /metrics has, of series that carry the labels used."""

import json
import re
from pathlib import Path

import pytest
import yaml

from services.control_plane.metrics import render
from services.control_plane.registry import Registry
from services.control_plane.view import build_status
from tests.heartbeats import (
    RUN,
    beat,
    evaluator_report,
    target_report,
    worker_report,
)

COMPOSE = Path(__file__).parents[2] / "compose"


def expressions() -> list[tuple[str, str]]:
    groups = yaml.safe_load((COMPOSE / "prometheus" / "alerts.yml").read_text())["groups"]
    rules = [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
    board = json.loads((COMPOSE / "grafana" / "dashboards" / "ringdraft.json").read_text())
    panels = [(p["title"], target["expr"]) for p in board["panels"] for target in p["targets"]]
    return rules + panels


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels by the name of a sample, of a run in which everything has reported."""
    registry = Registry(RUN, 0.5)
    reports = {"target_server": target_report(), "drafter_worker": worker_report(),
               "evaluator": evaluator_report()}  # fmt: skip
    for session, (service, report) in enumerate(reports.items(), 1):
        registry.take_heartbeat(beat(service, session=session, report=report))
    text = render(build_status(registry.snapshot(), RUN, "runs/demo")).decode()
    found: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^([a-z_]+)\{(.*)\} ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    return found


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_what_is_asked_for_is_there(
    where: str, expression: str, labels: dict[str, set[str]]
) -> None:
    for name, matchers in re.findall(r"\b([a-z]+_[a-z_]+)\b(?!\s*\()(\{[^}]*\})?", without_words(expression)):  # fmt: skip
        assert name in labels, f"{where}: {name} is not in /metrics"
        for label in re.findall(r"(\w+)=", matchers):
            assert label in labels[name], f"{where}: {name} has no label {label}"


def test_a_legend_names_labels_that_its_series_have(labels: dict[str, set[str]]) -> None:
    board = json.loads((COMPOSE / "grafana" / "dashboards" / "ringdraft.json").read_text())
    known = set().union(*labels.values())
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel[
                "title"
            ]


def without_words(expression: str) -> str:
    """Return an expression without what stands behind `by` and `on`, and without text in quotes."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    return re.sub(r"\b(by|on)\s*\([^)]*\)", "", bare)
