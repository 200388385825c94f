"""All mistakes in a run's file, including those that models and data find in their tables.

    definition, mistakes = check(text, trusted)          # `run check`, `run sign`, `run start`

`read_definition` looks at the sections. This module also has the tables `model`, `data`,
`optimizer` and `schedule` checked by the code that will read them, and finds settings that do not
go together, before anybody is invited.

This loads torch, and executes trusted modules. It is for the organiser, and for a volunteer only
once the definition is known to be genuine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from models.errors import ModelsError
from node.run.definition import RunDefinition, check_version, mistakes_in_sections
from node.run.mistakes import mistakes_in_table, parse
from node.run.trusted import (
    BrokenModule,
    mistakes_in_module_table,
    sha256_of,
    tables_of_modules,
)
from protocols.errors import PotluckError
from protocols.moshpit.cohorts import SMALLEST_GROUP

if TYPE_CHECKING:
    from models.trainable import Trainable

NAMING = ("name", "size")  # the keys that decide which other settings a table has


def check(
    text: bytes, trusted: Mapping[str, Path] | None = None
) -> tuple[RunDefinition | None, list[str]]:
    """The definition and all its mistakes; exactly one of the two is there. WrongDefinition for
    text that is not even TOML, NewerPotluckNeeded."""
    document = parse(text)
    check_version(document)
    mistakes = mistakes_in_table(document, RunDefinition)
    definition = None if mistakes else msgspec.convert(document, RunDefinition)
    tables = [*_mistakes_in_tables(document)]
    if definition is not None:
        mistakes += [*mistakes_in_sections(definition), *_contradictions_of_sections(definition)]
        if not tables:
            mistakes += [*_contradictions_of_tables(definition, trusted or {})]
    mistakes += tables
    return (None, mistakes) if mistakes else (definition, [])


def _mistakes_in_tables(document: Mapping[str, Any]) -> Iterator[str]:
    from models.experts import build_expert
    from models.registry import model_settings, optimizer_factory, schedule_factory
    from node.run.building import data_from_strangers

    readers: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "model": model_settings,
        "data": data_from_strangers,
        "optimizer": optimizer_factory,
        "schedule": schedule_factory,
        "experts.network": partial(build_expert, seed=None),
        "experts.optimizer": optimizer_factory,
        "experts.schedule": schedule_factory,
    }
    for name, read in readers.items():
        table = _table_at(document, name)
        if not isinstance(table, Mapping):
            continue  # it is missing, or no table: that was reported already
        if name in ("model", "data", "experts.network") and "module" in table:
            yield from mistakes_in_module_table(table, name)
            continue
        mistakes = [one for part in _parts_of(name, table) for one in mistakes_in_table(*part)]
        yield from mistakes or _said_by(partial(read, table), f"[{name}]")


def _table_at(document: Mapping[str, Any], place: str) -> object:
    found: object = document
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _parts_of(
    name: str, table: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], type[msgspec.Struct], str]]:
    """Each part of the table with the struct that reads it, so that all wrong values and unknown
    keys are reported at once. Nothing where the table's own name is wrong."""
    from models.data.settings import DataSettings, SourceSettings
    from models.experts import EXPERTS
    from models.registry import ALL_MODELS, OPTIMIZERS
    from models.schedules import DECAYS, ScheduleSettings

    named = table.get("name")
    called = named if isinstance(named, str) else None  # a list could not even be looked up
    own = {key: value for key, value in table.items() if name == "data" or key not in NAMING}
    if name == "model" and called in ALL_MODELS:
        kind, size = ALL_MODELS[called], table.get("size")
        known = kind.sizes.get(size) if isinstance(size, str) else None
        if known is not None:
            own = {**msgspec.to_builtins(known), **own}
        if known is not None or size is None:
            yield own, kind.settings, name
    elif name == "experts.network" and called in EXPERTS:
        yield own, EXPERTS[called].settings, name
    elif name.endswith("optimizer") and called in OPTIMIZERS:
        yield own, OPTIMIZERS[called].settings, name
    elif name.endswith("schedule") and called in DECAYS and "decay" not in own:
        yield {"decay": called, **own}, ScheduleSettings, name
    elif name == "data":
        sources = table.get("source")
        listed = sources if isinstance(sources, list) else []
        if listed and all(isinstance(source, Mapping) for source in listed):
            own.pop("source")
            for number, source in enumerate(listed, 1):
                yield source, SourceSettings, f"data.source, number {number}"
        yield own, DataSettings, name


def _contradictions_of_sections(definition: RunDefinition) -> Iterator[str]:
    """Settings of [training] and the like that contradict each other."""
    from protocols.accumulation.options import check_options

    options = definition.optimizer_options()
    del options["further"]  # which only has to be alike
    codec = definition.averaging.codec
    yield from _said_by(
        lambda: check_options(
            **options,
            auxiliary=False,
            codec=codec,
            approximate=definition.averaging.approximate,
        ),
        "[training]",
    )
    yield from _said_by(definition.collaboration_settings, "[averaging]")
    training = definition.training
    if training.samples_at_once > training.batch:
        yield (
            f"samples_at_once below [training] is {training.samples_at_once:,}, but the batch of "
            f"all peers together is only {training.batch:,}: one machine would make every step "
            "alone."
        )
    averaging = definition.averaging
    if averaging.group_size < SMALLEST_GROUP and not averaging.approximate:
        yield (
            f"group_size below [averaging] is {averaging.group_size}, but only groups of "
            f"{SMALLEST_GROUP} or more make cohorts: any further peer would only follow the run. "
            f"Take {SMALLEST_GROUP} or more, or approximate = true."
        )


def _contradictions_of_tables(
    definition: RunDefinition, trusted: Mapping[str, Path]
) -> Iterator[str]:
    """Settings of different tables that contradict each other."""
    from models.albert import AlbertSettings
    from models.masking import BYTE_VOCABULARY
    from models.registry import model_settings
    from node.run.building import mixtures_of, model_of

    training, schedule = definition.training, definition.schedule
    if schedule is not None and training.steps and schedule.get("warmup", 0) >= training.steps:
        yield (
            f"The run ends after {training.steps:,} steps, before the schedule's warm-up of "
            f"{schedule['warmup']:,}."
        )
    in_modules = {where for where, _ in tables_of_modules(definition)}
    if not in_modules & {"model", "experts.network"}:
        mixtures = mixtures_of(definition, {})

        def fits() -> None:
            _fit(definition, model_of(definition, {}, seed=None, mixtures=mixtures))

        yield from _said_by(fits, "[model]")
        settings = model_settings(definition.model)
        own = isinstance(settings, AlbertSettings) and settings.vocabulary != BYTE_VOCABULARY
        if own and not definition.data.keys() & {"module", "tokenizer"}:
            yield (
                "This model needs ids of its own vocabulary, but text data gives bytes: name the "
                "vocabulary's [data.tokenizer], use the size base-bytes or large-bytes, or a "
                "[data] module that makes the ids."
            )
    yield from _mistakes_of_modules(definition, trusted)


def _mistakes_of_modules(definition: RunDefinition, trusted: Mapping[str, Path]) -> Iterator[str]:
    """Load and call the modules that were trusted. The messages are for the modules' authors."""
    wrong = False
    for where, table in tables_of_modules(definition):
        name = table["module"]
        path = trusted.get(name)
        wanted, digest = table.get("sha256"), "" if path is None else sha256_of(path)
        if path is None:
            wrong = True
            yield (
                f"[{where}] is the module {name}, which is not part of potluck: name its file with "
                f"--trust-module PATH/{name}.py."
            )
        elif wanted not in (None, digest):
            wrong = True
            yield (
                f"sha256 below [{where}] is of another version of {name}.py: this file has "
                f'sha256 = "{digest}".'
            )
    if not wrong and tables_of_modules(definition):
        yield from _said_by(lambda: _try_modules(definition, trusted), "modules")


def _try_modules(definition: RunDefinition, trusted: Mapping[str, Path]) -> None:
    from node.run.building import data_of, mixtures_of, model_of

    seed, mixtures = definition.training.seed, mixtures_of(definition, trusted)
    model = model_of(definition, trusted, seed=seed, mixtures=mixtures)
    data_of(definition, model, trusted)
    _fit(definition, model)


def _fit(definition: RunDefinition, model: Trainable) -> None:
    """Raise ProtocolMisuse if the model has fewer parts than local steps are exchanged in, or no
    weight whose gradient is sent as factors."""
    from protocols.accumulation.fragments import fragments_of
    from protocols.accumulation.powersgd import check_rank

    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    sizes = [(name, one.numel()) for name, one in trained]
    fragments_of(sizes, definition.training.fragments)
    if definition.averaging.powersgd_rank:
        check_rank([one.shape for _, one in trained], definition.averaging.powersgd_rank)


def _said_by(look: Callable[[], object], where: str) -> Iterator[str]:
    try:
        look()
    except BrokenModule as error:
        yield " ".join(part for part in (f"{where}: {error.what}", error.why) if part)
    except (ModelsError, PotluckError) as error:
        yield " ".join(part for part in (f"{where}: {error.what}", error.advice) if part)
