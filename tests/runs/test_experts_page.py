"""docs/experts.md is right about a run with experts."""

from __future__ import annotations

import re
from pathlib import Path

from node.app.commands import run_check
from node.run.checking import check
from node.run.costs import costs_of
from node.training.loop import MISSING_SECONDS

PAGE = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Training a run with experts\n")[1].split("\n## ")[0]
REST = """
[run]
name = "poem"
[optimizer]
name = "adamw"
lr = 0.003
[training]
batch = 1024
"""


def block(kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_definition_on_the_page_has_no_mistake_and_costs_what_it_says() -> None:
    definition, mistakes = check((REST + block("toml")).encode())
    assert definition is not None, mistakes
    rows = run_check.rows_of_experts(definition, costs_of(definition), {})
    assert [f"{name:<9}{text}" for name, text in rows] == block("text").splitlines()


def test_the_time_before_a_trainer_complains_is_that_of_the_code() -> None:
    assert MISSING_SECONDS == 3.0
    assert "no batch succeeds for three seconds" in SECTION
