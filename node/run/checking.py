"""Everything that is wrong with a run's file, also in what models and data say of their tables.

    definition, mistakes = check(text, trusted)          # `run check`, `run sign`, `run start`

`read_definition` looks at the sections; here the tables `model`, `data`, `optimizer` and `schedule`
are looked at by those who will read them, and what does not go together is found before anybody
is invited to it.

Easy to get wrong: this loads torch, and for a module executes it. It is for the organiser, and for
a volunteer only once the definition is known to be genuine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from models.errors import ModelsError
from node.run.definition import RunDefinition, check_version
from node.run.mistakes import mistakes_in_table, parse
from node.run.trusted import mistakes_in_module_table
from protocols.errors import PotluckError


def check(
    text: bytes, trusted: Mapping[str, Path] | None = None
) -> tuple[RunDefinition | None, list[str]]:
    """The definition, and all its mistakes: one of the two is there. WrongDefinition for what is
    not even TOML, NewerPotluckNeeded."""
    document = parse(text)
    check_version(document)
    mistakes = mistakes_in_table(document, RunDefinition)
    mistakes += _mistakes_in_tables(document)
    if mistakes:
        return None, mistakes
    definition = msgspec.convert(document, RunDefinition)
    mistakes = [*_contradictions(definition, trusted or {})]
    return (None, mistakes) if mistakes else (definition, [])


def _mistakes_in_tables(document: Mapping[str, Any]) -> Iterator[str]:
    from models.registry import model_settings, optimizer_factory, schedule_factory
    from node.run.building import data_from_strangers

    readers: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "model": model_settings,
        "data": data_from_strangers,
        "optimizer": optimizer_factory,
        "schedule": schedule_factory,
    }
    for name, read in readers.items():
        table = document.get(name)
        if not isinstance(table, Mapping):
            continue  # it is missing, or no table: that has been said
        if name in ("model", "data") and "module" in table:
            yield from mistakes_in_module_table(table, name)
            continue
        yield from _said_by(partial(read, table), f"[{name}]")


def _contradictions(definition: RunDefinition, trusted: Mapping[str, Path]) -> Iterator[str]:
    """What no single table shows."""
    from models.albert import AlbertSettings
    from models.masking import BYTE_VOCABULARY
    from models.registry import model_settings
    from protocols.accumulation.options import check_options

    options = definition.optimizer_options()
    yield from _said_by(lambda: check_options(**options, auxiliary=False), "[training]")
    yield from _said_by(definition.collaboration_settings, "[averaging]")
    training, schedule = definition.training, definition.schedule
    if training.samples_at_once > training.batch:
        yield (
            f"samples_at_once below [training] is {training.samples_at_once:,}, and the batch of "
            f"all together only {training.batch:,}: one machine would make every step alone."
        )
    if schedule is not None and training.steps and schedule.get("warmup", 0) >= training.steps:
        yield (
            f"The run is over after {training.steps:,} steps, before the schedule's warm-up of "
            f"{schedule['warmup']:,} is."
        )
    if "module" not in definition.model:
        settings = model_settings(definition.model)
        own = isinstance(settings, AlbertSettings) and settings.vocabulary != BYTE_VOCABULARY
        if own and "module" not in definition.data:
            yield (
                "This model wants ids of its own vocabulary, and data of text gives bytes: take "
                "the size base-bytes or large-bytes, or a [data] module that makes the ids."
            )
    if "module" in definition.model or "module" in definition.data:
        yield from _said_by(lambda: _try_modules(definition, trusted), "modules")


def _try_modules(definition: RunDefinition, trusted: Mapping[str, Path]) -> None:
    """Load and call them, where they were trusted; else that is said."""
    from node.run.building import data_of, model_of

    model = model_of(definition, trusted, seed=definition.training.seed)
    data_of(definition, model, trusted)


def _said_by(look: Callable[[], object], where: str) -> Iterator[str]:
    try:
        look()
    except (ModelsError, PotluckError) as error:
        yield " ".join(part for part in (f"{where}: {error.what}", error.advice) if part)
