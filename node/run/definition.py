"""A run's definition: the contents of `run.toml`, read and checked.

    definition = read_definition(text)      # WrongDefinition names every mistake and its place
    definition.name, definition.training.batch
    definition.collaboration_settings()      # for open_training
    incompatible_parts(before, after)       # ["[optimizer]", "batch below [training]"]

All peers in a run train by the same definition. The organiser signs the exact bytes of the file
(node/run/signed.py), so nothing here is ever written back. The tables `model`, `data`, `optimizer`
and `schedule`, and those of the experts, are checked elsewhere, because that needs torch
(node/run/checking.py, building.py).

Two peers train together if their steps are alike: the same model, optimizer, schedule, batch and
codec (protocols/accumulation/training_description.py). Peers whose definitions differ in one of
these train apart until they start again. Data, limits, checkpoints, precision, compiling and the
end of a run may differ: a peer that starts later takes such a change and trains beside the others.

A definition from a newer potluck must end in "this needs version …" and not in "there is no key …",
so the format and the least version are checked before any other key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from auth.fields import RunName
from node.core.tracker import read_tracker
from node.core.wrong_use import WrongUse
from node.net import VERSION
from node.run.mistakes import (
    LINE_PATTERN,
    VERSION_PATTERN,
    WrongDefinition,
    mistakes_in_table,
    parse,
)
from protocols.experts import LARGEST_DIMENSION, MOST_DIMENSIONS
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.settings import GROUP_SIZE, MATCHMAKING_SECONDS, ROUND_SECONDS
from protocols.runs.messages import UnusableDefinition
from protocols.tensors import CODECS, CodecName

if TYPE_CHECKING:
    from node.run.checkpoint_keeper import CheckpointSettings
    from protocols.accumulation.collaboration import CollaborationSettings


__all__ = ["NewerPotluckNeeded", "RunDefinition", "WrongDefinition", "read_definition"]

FORMAT = 1
"""The file's format. A potluck that knows only older formats says which version it needs."""

LARGEST_COUNT = 1 << 40  # of steps, samples or MB: more than any run needs
LONGEST_SECONDS = 86_400.0

Precision = Literal["float32", "bf16", "fp16"]
EVERY_SECONDS = 300.0  # as in node/run/checkpoint_keeper.py, which would import torch
Table = dict[str, Any]
Above = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
OrNone = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Seconds = Annotated[float, Meta(gt=0.0, le=LONGEST_SECONDS)]

LONGEST_WORDS = 120  # of a setting, where peers compare theirs

MOST_TRACKERS = 8  # each is a thread
MOST_FRAGMENTS = 1024  # the largest models have some hundred layers
LARGEST_RANK = 1024  # as in protocols/accumulation/powersgd.py, which would import torch
MOST_GRIDS = 64  # mixtures of one model
MOST_ACTIVE = 64  # experts of one example
MOST_IN_FLIGHT = 64  # as in the paper; each is a thread with its activations


class NewerPotluckNeeded(UnusableDefinition):
    """The run asks for a later version of potluck than this one."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RunSection(_Section, frozen=True, kw_only=True):
    """`[run]`"""

    name: RunName
    description: Annotated[str, Meta(max_length=300, pattern=LINE_PATTERN)] = ""
    """A line for people, shown to volunteers before they train."""


class TrainingSection(_Section, frozen=True, kw_only=True):
    """`[training]`: how steps are made, the same at all peers."""

    batch: Above
    """Samples of one step of all peers together."""
    samples_at_once: Annotated[int, Meta(ge=1, le=1 << 20)] = 32
    """The most samples that one machine computes at once; a weak machine takes fewer."""
    steps: OrNone = 0
    """The run ends after this many steps of all peers together; 0: when it is stopped."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """For the initial parameters and the order of the data."""
    precision: Precision = "float32"
    """The type that GPUs compute passes in, where they can: float32, bf16, fp16."""
    compile: bool = False
    """Each machine that can compiles the model (torch.compile), unless its owner decides."""
    max_norm: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """The averaged gradient is clipped to this norm; without it, not at all."""
    delayed: bool = False
    """Compute the next batch while the last one is averaged and stepped with."""
    local_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """With more than 1, every machine makes this many steps of its own between two exchanges."""
    fragments: Annotated[int, Meta(ge=1, le=MOST_FRAGMENTS)] = 1
    """With more than 1, local steps are exchanged in so many parts, one after the other."""

    @property
    def step_samples(self) -> int:
        """Samples of one step of the run: with local steps, of one exchange."""
        return self.batch * self.local_steps // self.fragments


class AveragingSection(_Section, frozen=True, kw_only=True):
    """`[averaging]`: how gradients travel."""

    codec: CodecName | dict[str, CodecName] = "float16"
    """For all parameters, or for each by its name (others: none)."""
    grace_seconds: Seconds = MATCHMAKING_SECONDS
    """The longest time that a round waits for the peers that are expected."""
    round_seconds: Seconds = ROUND_SECONDS
    """The longest time that a round may take."""
    group_size: Annotated[int, Meta(ge=2, le=LARGEST_GROUP)] = GROUP_SIZE
    """The most peers in a group. A run with more of them averages by cohorts."""
    approximate: bool = False
    """More peers than fit into a group average over a grid, and do not get the same bits."""
    powersgd_rank: Annotated[int, Meta(ge=0, le=LARGEST_RANK)] = 0
    """The gradient of a large matrix is sent as two thin ones of so many columns; 0: whole."""
    parameters_every: OrNone = 0
    """Every this many steps the parameters are averaged, too; 0: never."""


GridName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z")]  # as in protocols/experts/grid


class ExpertsSection(_Section, frozen=True, kw_only=True):
    """`[experts]`: what the mixtures of the model are made of. Only for a model that has some.

    Experts train where they are served: each makes its own steps, with its own optimizer.
    """

    grids: Annotated[tuple[GridName, ...], Meta(min_length=1, max_length=MOST_GRIDS)]
    """The name of each mixture's grid, in the order of the model's layers."""
    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=LARGEST_DIMENSION)], ...],
        Meta(min_length=1, max_length=MOST_DIMENSIONS),
    ]
    """The sizes of every grid's dimensions. More cells than experts, for those who come later."""
    network: Table
    """One expert: a network of models/experts.py, or a module's."""
    optimizer: Table
    schedule: Table | None = None
    """For the expert's own steps."""
    k: Annotated[int, Meta(ge=1, le=MOST_ACTIVE)] = 4
    """The experts that each example goes to."""
    quorum: Annotated[int, Meta(ge=1, le=MOST_ACTIVE)] = 1
    """How many of them must answer, or the batch is dropped."""
    grace_seconds: Annotated[float, Meta(ge=0.0, le=LONGEST_SECONDS)] = 3.0
    """How long the others are waited for once all examples have their quorum."""
    timeout_seconds: Seconds = 30.0
    """The longest that one pass in one direction waits for experts."""
    codec: CodecName = "float16"
    """How examples and their gradients travel."""
    balance: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.01
    """The weight of the loss that keeps the gates from choosing few experts."""
    in_flight: Annotated[int, Meta(ge=1, le=MOST_IN_FLIGHT)] = 4
    """The batches that a trainer has under way at once while it waits for experts."""
    max_norm: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """The gradient of an expert's step is clipped to this norm."""


class LimitsSection(_Section, frozen=True, kw_only=True):
    """`[limits]`: who can take part."""

    least_version: Annotated[str, Meta(max_length=32, pattern=VERSION_PATTERN)] = "0.1.0"
    """The least version of potluck."""
    memory_mb: OrNone = 0
    """Millions of bytes of memory that a volunteer must have; 0: an estimate is used (costs.py)."""


class CheckpointsSection(_Section, frozen=True, kw_only=True):
    """`[checkpoints]`: the checkpoints that the organiser's peer keeps."""

    every_seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = EVERY_SECONDS
    keep_last: Annotated[int, Meta(ge=1, le=1_000_000)] = 3
    keep_every: OrNone = 0


class PageSection(_Section, frozen=True, kw_only=True):
    """`[page]`: what the run's page shows to everybody who can open it (node/app/page/)."""

    names: Literal["auto", "names", "pseudonyms"] = "auto"
    """How peers are named: `auto` is by their names in an open run, and by pseudonyms in a closed
    one."""
    events: bool = True
    """Whether the page has the last events."""


class TrackingSection(_Section, frozen=True, kw_only=True):
    """`[tracking]`: what the organiser's own peer writes the run's figures to. It means nothing to
    any other peer: trackers write files and contact addresses."""

    track: Annotated[tuple[str, ...], Meta(max_length=MOST_TRACKERS)] = ()
    """As node/core/tracker.py reads them; paths are in the run's folder."""


class RunDefinition(_Section, frozen=True, kw_only=True):
    """The whole definition. `model`, `optimizer` and `schedule` are those of models/registry.py,
    `data` is that of models/data/settings.py. `model` and `data` may each name a module of the
    volunteer's own instead (node/run/trusted.py)."""

    format: Literal[1] = 1
    run: RunSection
    model: Table
    data: Table = {}
    optimizer: Table
    schedule: Table | None = None
    training: TrainingSection
    averaging: AveragingSection = AveragingSection()
    experts: ExpertsSection | None = None
    limits: LimitsSection = LimitsSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    page: PageSection = PageSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def first_parameters(self) -> str:
        """A fingerprint of everything that decides the run's initial parameters. Two definitions
        with different ones belong to different runs, whatever their names."""
        parts: list[object] = [self.model, self.training.seed]
        if self.experts is not None:
            parts.append([self.experts.grids, self.experts.sizes, self.experts.network])
        made_of = msgspec.json.encode(parts, order="sorted")
        return blake3(made_of).hexdigest(length=16)

    @property
    def kind_of_experts(self) -> str:
        """A fingerprint of everything that decides an expert's first weights, and what is in a copy
        of one. Servers with different ones cannot take over from one another."""
        shared = {} if self.experts is None else shared_by_experts(self.experts)
        shared.pop("k below [experts]", None)  # of the trainers
        made_of = msgspec.json.encode([self.first_parameters, shared], order="sorted")
        return blake3(made_of).hexdigest(length=8)

    def collaboration_settings(
        self,
        *,
        name: str = "",
        begins: bool = False,
        up_bytes_per_second: float = 0.0,
        down_bytes_per_second: float = 0.0,
        fetching_folder: Path | None = None,
        most_kept_bytes: float = math.inf,
        most_followed_bytes: float = math.inf,
        has_memory_for: Callable[[int], bool] = lambda _: True,
    ) -> CollaborationSettings:
        """Settings for `open_training`: the run's from here, this machine's from the caller."""
        from protocols.accumulation.collaboration import CollaborationSettings

        return CollaborationSettings(
            run=self.run.name,
            target_batch=self.training.batch,
            codec=self.averaging.codec,
            grace_seconds=self.averaging.grace_seconds,
            round_seconds=self.averaging.round_seconds,
            group_size=self.averaging.group_size,
            approximate=self.averaging.approximate,
            name=name,
            begins=begins,
            up_bytes_per_second=up_bytes_per_second,
            down_bytes_per_second=down_bytes_per_second,
            fetching_folder=fetching_folder,
            most_kept_bytes=most_kept_bytes,
            most_followed_bytes=most_followed_bytes,
            has_memory_for=has_memory_for,
        )

    def compiling(self, wanted: bool) -> RunDefinition:
        """The same run, for a machine that compiles its model, or does not."""
        training = msgspec.structs.replace(self.training, compile=wanted)
        return msgspec.structs.replace(self, training=training)

    def optimizer_options(self) -> dict[str, Any]:
        """Keyword arguments of CollaborativeOptimizer that all peers of the run share."""
        return {
            "delayed": self.training.delayed,
            "local_steps": self.training.local_steps,
            "fragments": self.training.fragments,
            "max_norm": self.training.max_norm,
            "average_parameters_every": self.averaging.parameters_every,
            "last_epoch": self.training.steps,
            "powersgd_rank": self.averaging.powersgd_rank,
            "precision": self.training.precision,
            "further": {}
            if self.experts is None
            else {
                place: _as_words(value) for place, value in shared_by_experts(self.experts).items()
            },
        }

    def checkpoint_settings(self, folder: Path, model: Mapping[str, Any]) -> CheckpointSettings:
        """For the peer that keeps the run's checkpoints."""
        from node.run.checkpoint_keeper import CheckpointSettings
        from node.run.checkpoints import KeepPolicy

        policy = KeepPolicy(self.checkpoints.keep_last, self.checkpoints.keep_every)
        return CheckpointSettings(
            folder, self.checkpoints.every_seconds, policy, model, self.training.steps
        )


def _as_words(value: object) -> str:
    """A setting as a short text, which differs if the setting does."""
    text = msgspec.json.encode(value, order="sorted")
    if len(text) <= LONGEST_WORDS:
        return text.decode()
    return f"{text.decode()[:LONGEST_WORDS]}… ({blake3(text).hexdigest(length=8)})"


def read_definition(text: bytes) -> RunDefinition:
    """The definition in the text of a run.toml. WrongDefinition names every mistake in it;
    NewerPotluckNeeded is raised before that."""
    document = parse(text)
    check_version(document)
    mistakes = mistakes_in_table(document, RunDefinition)
    if mistakes:
        raise WrongDefinition.of(mistakes)
    definition = msgspec.convert(document, RunDefinition)
    mistakes = [*mistakes_in_sections(definition)]
    if mistakes:
        raise WrongDefinition.of(mistakes)
    return definition


def mistakes_in_sections(definition: RunDefinition) -> Iterator[str]:
    """The mistakes that the types of the settings do not show."""
    yield from _mistakes_of_experts(definition)
    yield from _mistakes_of_tracking(definition)


def _mistakes_of_experts(definition: RunDefinition) -> Iterator[str]:
    """Settings below [experts] that contradict each other, or the others."""
    section = definition.experts
    if section is None:
        return
    for name in dict.fromkeys(section.grids):
        if section.grids.count(name) > 1:
            yield f"grids below [experts] has two grids called {name}: each mixture has its own."
    if section.quorum > section.k:
        yield (
            f"quorum below [experts] is {section.quorum}, but only {section.k} experts are asked "
            "for an example (k)."
        )
    cells = math.prod(section.sizes)
    if section.k > cells:
        yield f"k below [experts] is {section.k}, but the grid has room for {cells} experts only."
    if CODECS[section.codec].is_sparse:
        yield (
            f"codec below [experts] cannot be {section.codec}, which sends one value in four: "
            "choose another codec."
        )
    if definition.training.compile:
        yield (
            "compile below [training] cannot be true in a run with experts, where a pass waits for "
            "other machines: leave it out."
        )
    if definition.training.precision == "fp16":
        yield (
            "precision below [training] cannot be fp16 in a run with experts, whose gradients "
            "would need its loss scale: choose bf16 or float32."
        )


def _mistakes_of_tracking(definition: RunDefinition) -> Iterator[str]:
    for word in definition.tracking.track:
        try:
            tracker = read_tracker(word)
        except WrongUse as error:
            yield f"track below [tracking]: {error.what} {error.why} {error.advice}"
            continue
        if not tracker.stays_below:
            yield (
                f"track below [tracking]: {word[:60]!r} leads out of the run's folder, which may "
                "be a stranger's. Write a path in it; --track takes any other."
            )


def name_in(text: bytes) -> str:
    """The run's name in a text that may have other mistakes; empty if it cannot be found."""
    try:
        run = parse(text).get("run")
    except WrongDefinition:
        return ""
    name = run.get("name") if isinstance(run, Mapping) else None
    return name if isinstance(name, str) else ""


def check_version(document: Mapping[str, Any]) -> None:
    """NewerPotluckNeeded if the definition asks for it, whatever else is in it."""
    limits = document.get("limits")
    least = limits.get("least_version") if isinstance(limits, Mapping) else None
    if isinstance(least, str) and is_later(least):
        raise too_old(f"It needs potluck {least} or later.")
    format_ = document.get("format")
    if type(format_) is int and format_ > FORMAT:
        raise too_old(f"Its definition is of format {format_}, and this one reads {FORMAT}.")


def is_later(version: str) -> bool:
    """Whether this is a later version of potluck than the one that runs."""
    return _numbers(version) > _numbers(VERSION)


def _numbers(version: str) -> tuple[int, ...]:
    """To compare by; empty for a wrong version, which is reported elsewhere."""
    parts = version[:64].split(".")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return ()
    numbers = [int(part) for part in parts]
    while numbers and not numbers[-1]:  # 1.0 is the same as 1
        numbers.pop()
    return tuple(numbers)


def too_old(why: str) -> NewerPotluckNeeded:
    return NewerPotluckNeeded(
        f"This potluck ({VERSION}) is too old for the run.",
        why=why,
        advice="Update potluck (`git pull` in its checkout), and repeat the command.",
    )


TABLES = ("model", "optimizer", "schedule")
KEYS = {
    "training": ("batch", "max_norm", "local_steps", "fragments"),
    "averaging": ("codec", "group_size", "approximate", "powersgd_rank", "parameters_every"),
}
OF_EXPERTS = ("grids", "sizes", "network", "k")


def shared_by_experts(section: ExpertsSection) -> dict[str, Any]:
    """What all members have alike about experts, by its place. A copy of an expert has what the
    optimizer and the schedule remember, so their kinds are part of it. Other settings are not."""
    momentum = section.optimizer.get("momentum")
    return {
        **{f"{key} below [experts]": getattr(section, key) for key in OF_EXPERTS},
        "name below [experts.optimizer]": section.optimizer.get("name"),
        "momentum below [experts.optimizer]": "not set"
        if momentum is None
        else ("above 0" if momentum else "0"),
        "[experts.schedule]": "missing" if section.schedule is None else "there",
    }


def incompatible_parts(before: RunDefinition, after: RunDefinition) -> list[str]:
    """The places in which these definitions differ so that their peers do not train together; empty
    if they do."""
    found = [f"[{name}]" for name in TABLES if getattr(before, name) != getattr(after, name)]
    for section, keys in KEYS.items():
        old, new = getattr(before, section), getattr(after, section)
        found += [
            f"{key} below [{section}]" for key in keys if getattr(old, key) != getattr(new, key)
        ]
    if before.experts is not None and after.experts is not None:
        if before.training.seed != after.training.seed:  # of their first weights, and their name
            found.append("seed below [training]")
        theirs = shared_by_experts(after.experts)
        found += [
            place
            for place, value in shared_by_experts(before.experts).items()
            if value != theirs[place]
        ]
    elif before.experts != after.experts:
        found.append("[experts]")
    return found


def places_in_words(places: list[str]) -> str:
    """The places as one list in words."""
    return places[0] if len(places) == 1 else f"{', '.join(places[:-1])} and {places[-1]}"
