"""docs/organisers.md is right about the models."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from models.registry import MODELS, build_model, model_settings, optimizer_factory, schedule_factory
from models.trainable import parameter_count

PAGE = (Path(__file__).parents[2] / "docs" / "organisers.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## The models\n")[1].split("\n## ")[0]


def block(kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_settings_on_the_page_can_be_built() -> None:
    settings = tomllib.loads(block("toml"))
    model_settings(settings["model"])
    optimizer_factory(settings["optimizer"])
    schedule_factory(settings["schedule"])


@pytest.mark.slow
def test_the_loop_on_the_page_runs() -> None:
    exec(compile(block("python"), "docs/organisers.md", "exec"), {})  # noqa: S102


def test_the_table_names_every_size_with_its_parameters() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w-]+)` \| ([\d,]+) \|", SECTION, re.MULTILINE)
    real = [
        (name, size, f"{parameter_count(build_model({'name': name, 'size': size}, seed=None)):,}")
        for name, kind in MODELS.items()
        for size in kind.sizes
    ]
    assert rows == real
