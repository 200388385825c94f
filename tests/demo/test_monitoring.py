"""The dashboard and the alert rules use figures that `/metrics` has, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from node.app.backbone import PREFIX, BackboneRecord, metrics_text
from node.core.training_view import ExpertsView, GridView, TrainerView
from node.training.happenings import Began, RecordsSummed
from protocols.accumulation.events import CheckpointSaved
from protocols.network import TrafficFacts
from tests.demo.test_backbone import LISTENS, RELAY
from tests.demo.told import step_taken

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "monitoring"

PROMETHEUS_LABELS = {"instance", "job"}  # which it adds itself
FIGURE = re.compile(r"\bpotluck_\w+(?:\{([^}]*)\})?")
LABEL = re.compile(r'(\w+)\s*(=~|=|!=|!~)\s*"([^"]*)"')
BY = re.compile(r"\b(?:by|on|without) \(([^)]*)\)")


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, set[str]]]:
    """Each figure that a backbone with everything has, with its labels and their values."""
    record = BackboneRecord(checkpoint_seconds=300.0, clock=lambda: 0.0)
    step = msgspec.structs.replace(step_taken(6), loss=2.5, learning_rate=0.001)
    for event in (
        Began("poem", 0),
        step,
        CheckpointSaved(7, "/7", 5_000_000, 0.1),
        RecordsSummed(7, 672, 10**6, 2, 1, 3, 9),
    ):
        record.take(event)
    status = msgspec.structs.replace(LISTENS, relay=RELAY, memory_bytes=1)
    view = TrainerView(experts=ExpertsView(grids=(GridView(name="ffn0"),)))
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(
        metrics_text(status, TrafficFacts(), view, record).decode()
    ):
        for one in family.samples:
            labels = found.setdefault(one.name, {})
            for name, value in one.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def strings_called(key: str, value: Any) -> Iterator[str]:
    match value:
        case dict():
            for name, inner in value.items():
                if name == key and isinstance(inner, str):
                    yield inner
                else:
                    yield from strings_called(key, inner)
        case list():
            for inner in value:
                yield from strings_called(key, inner)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    return [*strings_called("expr", dashboard()), *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_uses_what_metrics_has(
    expression: str, figures: dict[str, dict[str, set[str]]]
) -> None:
    used = list(FIGURE.finditer(expression))
    assert used
    known = set(PROMETHEUS_LABELS)
    for one in used:
        name = one[0].partition("{")[0]
        assert name in figures
        known |= set(figures[name])
        for label, how, value in LABEL.findall(one[1] or ""):
            if label not in PROMETHEUS_LABELS:
                assert how == "="
                assert value in figures[name][label]
    for labels in BY.findall(expression):
        assert {label.strip() for label in labels.split(",")} <= known


def test_the_legend_of_a_panel_names_labels_that_its_lines_have(
    figures: dict[str, dict[str, set[str]]],
) -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            names = [one[0].partition("{")[0] for one in FIGURE.finditer(target["expr"])]
            kept = BY.search(target["expr"])
            there = (
                {label.strip() for label in kept[1].split(",")}
                if kept
                else PROMETHEUS_LABELS.union(*(figures[name] for name in names))
            )
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= there


def test_the_dashboard_offers_the_backbones_that_there_are(
    figures: dict[str, dict[str, set[str]]],
) -> None:
    (variable,) = [one for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    asked = re.fullmatch(r"label_values\((\w+), instance\)", variable["query"]["query"])
    assert asked is not None
    assert asked[1] in figures


def test_panels_do_not_lie_upon_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_an_operator_is_woken_for_three_things_and_told_what_to_do() -> None:
    assert len(rules()) == 3
    for rule in rules():
        assert rule["labels"] == {"severity": "page"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert PREFIX in rule["expr"]
