"""Each recipe of `run init` is a run that trains as it is written."""

from __future__ import annotations

import tomllib

import pytest

from node.run.building import build_task
from node.run.checking import check
from node.run.definition import read_definition
from node.run.template import RECIPES, WHOLE, new_definition

every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@every_recipe
def test_it_has_no_mistake(recipe: str) -> None:
    definition, mistakes = check(new_definition("poem", recipe))
    assert not mistakes
    assert definition is not None


@every_recipe
def test_the_file_has_the_keys_of_the_recipe_and_the_explanations_of_all_others(
    recipe: str,
) -> None:
    text = new_definition("poem", recipe).decode()
    written = tomllib.loads(text)
    for section, keys in RECIPES[recipe].changes.items():
        table = written
        for part in section.split("."):
            table = table[part]
        there = {key: value for key, value in table.items() if not isinstance(value, dict)}
        wanted = {key: value for key, value in keys.items() if value is not None}
        assert wanted.items() <= there.items()
        assert section not in WHOLE or there == wanted
        assert not {key for key, value in keys.items() if value is None} & set(there)
    comments = [line for line in new_definition("poem").decode().splitlines() if line[:2] == "# "]
    assert [line for line in text.splitlines() if line[:2] == "# "] == comments


@every_recipe
def test_a_batch_that_it_has_seen_has_a_lower_loss(recipe: str) -> None:
    task = build_task(read_definition(new_definition("poem", recipe)))
    optimizer = task.optimizer_factory(task.named_parameters)
    batch = task.made_up_batch(4)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(float(task.compute(batch)))
        optimizer.step()
    assert losses[-1] < losses[0]
