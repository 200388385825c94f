"""A run's definition: what `run.toml` says, read and checked.

    definition = read_definition(text)      # WrongDefinition names what is wrong, and where
    definition.name, definition.training.batch
    definition.collaboration_settings(client=False)      # for open_training

Everybody in a run trains by the same definition. What the organiser signs are the very bytes of
the file (node/run/signed.py), so nothing here is ever written back.

What stands in the tables `model`, `data`, `optimizer` and `schedule` is not looked at here: that
needs torch (node/run/checking.py, and building.py).

Easy to get wrong: a newer potluck's definition must end in "this needs version …" and not in
"there is no key …". So format and least version are looked at before any other key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from auth.fields import RunName
from node.run.mistakes import (
    LINE_PATTERN,
    VERSION_PATTERN,
    WrongDefinition,
    mistakes_in_table,
    parse,
)
from node.version import VERSION
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.layout import CodecName
from protocols.moshpit.settings import GROUP_SIZE, MATCHMAKING_SECONDS, ROUND_SECONDS
from protocols.runs.messages import UnusableDefinition

if TYPE_CHECKING:
    from node.checkpoint_keeper import CheckpointSettings
    from protocols.accumulation.collaboration import CollaborationSettings

__all__ = ["NewerPotluckNeeded", "RunDefinition", "WrongDefinition", "read_definition"]

FORMAT = 1
"""Of the file. A potluck that knows only older formats says which version it would need to be."""

LARGEST_COUNT = 1 << 40  # of steps, samples or MB: nobody has a million million
LONGEST_SECONDS = 86_400.0

Precision = Literal["float32", "bf16", "fp16"]
EVERY_SECONDS = 300.0  # as in node/checkpoint_keeper.py, which brings torch
Table = dict[str, Any]
Above = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
OrNone = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Seconds = Annotated[float, Meta(gt=0.0, le=LONGEST_SECONDS)]


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
    """The most samples that one machine computes at once; a weak one takes fewer by itself."""
    steps: OrNone = 0
    """After how many steps of all peers together the run is over; 0: when it is stopped."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """Of the initial parameters and of the order of the data."""
    precision: Precision = "float32"
    """What passes are computed in where a GPU can: float32, bf16, fp16."""
    max_norm: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """What the averaged gradient is clipped to; without, it is not clipped."""
    delayed: bool = False
    """The next batch is computed while the last one is averaged and stepped with."""
    local_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """More than 1: every machine makes so many steps of its own between two exchanges."""


class AveragingSection(_Section, frozen=True, kw_only=True):
    """`[averaging]`: how gradients travel."""

    codec: CodecName | dict[str, CodecName] = "float16"
    """For all parameters, or for each by its name (others: none)."""
    grace_seconds: Seconds = MATCHMAKING_SECONDS
    """How long at most a round waits for those who are expected."""
    round_seconds: Seconds = ROUND_SECONDS
    """How long a round may take."""
    group_size: Annotated[int, Meta(ge=2, le=LARGEST_GROUP)] = GROUP_SIZE
    """How many peers may be in a round; more follow the run until a place is free."""
    approximate: bool = False
    """More than fit into a group average over a grid, and do not get the same bits."""
    parameters_every: OrNone = 0
    """After so many steps the parameters are averaged, too; 0: never."""


class LimitsSection(_Section, frozen=True, kw_only=True):
    """`[limits]`: who can take part."""

    least_version: Annotated[str, Meta(max_length=32, pattern=VERSION_PATTERN)] = "0.1.0"
    """Of potluck."""
    memory_mb: OrNone = 0
    """Millions of bytes that a volunteer must have for it; 0: what is worked out (costs.py)."""


class CheckpointsSection(_Section, frozen=True, kw_only=True):
    """`[checkpoints]`: what the organiser's peer keeps."""

    every_seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = EVERY_SECONDS
    keep_last: Annotated[int, Meta(ge=1, le=1_000_000)] = 3
    keep_every: OrNone = 0


class RunDefinition(_Section, frozen=True, kw_only=True):
    """All of it. `model`, `optimizer` and `schedule` are those of models/registry.py, `data` is
    that of models/data/settings.py; `model` and `data` may each name a module of the volunteer's
    own instead (node/run/trusted.py)."""

    format: Literal[1] = 1
    run: RunSection
    model: Table
    data: Table = {}
    optimizer: Table
    schedule: Table | None = None
    training: TrainingSection
    averaging: AveragingSection = AveragingSection()
    limits: LimitsSection = LimitsSection()
    checkpoints: CheckpointsSection = CheckpointsSection()

    @property
    def name(self) -> str:
        return self.run.name

    def collaboration_settings(
        self,
        *,
        client: bool = False,
        name: str = "",
        begins: bool = False,
        up_bytes_per_second: float = 0.0,
        down_bytes_per_second: float = 0.0,
        fetching_folder: Path | None = None,
    ) -> CollaborationSettings:
        """What `open_training` takes: the run's part from here, this machine's from the caller."""
        from protocols.accumulation.collaboration import CollaborationSettings

        return CollaborationSettings(
            run=self.run.name,
            target_batch=self.training.batch,
            codec=self.averaging.codec,
            grace_seconds=self.averaging.grace_seconds,
            round_seconds=self.averaging.round_seconds,
            group_size=self.averaging.group_size,
            approximate=self.averaging.approximate,
            client=client,
            name=name,
            begins=begins,
            up_bytes_per_second=up_bytes_per_second,
            down_bytes_per_second=down_bytes_per_second,
            fetching_folder=fetching_folder,
        )

    def optimizer_options(self) -> dict[str, Any]:
        """Keyword arguments of CollaborativeOptimizer that all peers of the run share."""
        return {
            "delayed": self.training.delayed,
            "local_steps": self.training.local_steps,
            "max_norm": self.training.max_norm,
            "average_parameters_every": self.averaging.parameters_every,
            "last_epoch": self.training.steps,
            "precision": self.training.precision,
        }

    def checkpoint_settings(self, folder: Path, model: Mapping[str, Any]) -> CheckpointSettings:
        """For the peer that keeps the run's checkpoints."""
        from node.checkpoint_keeper import CheckpointSettings
        from node.checkpoints import KeepPolicy

        policy = KeepPolicy(self.checkpoints.keep_last, self.checkpoints.keep_every)
        return CheckpointSettings(
            folder, self.checkpoints.every_seconds, policy, model, self.training.steps
        )


def read_definition(text: bytes) -> RunDefinition:
    """What the text of a run.toml says. WrongDefinition names everything that is wrong in it;
    NewerPotluckNeeded comes before that."""
    document = parse(text)
    check_version(document)
    mistakes = mistakes_in_table(document, RunDefinition)
    if mistakes:
        raise WrongDefinition.of(mistakes)
    return msgspec.convert(document, RunDefinition)


def name_in(text: bytes) -> str:
    """The run's name in a text that may be wrong otherwise; empty if it is not to be found."""
    try:
        run = parse(text).get("run")
    except WrongDefinition:
        return ""
    name = run.get("name") if isinstance(run, Mapping) else None
    return name if isinstance(name, str) else ""


def check_version(document: Mapping[str, Any]) -> None:
    """NewerPotluckNeeded if the definition says so, whatever else is in it."""
    limits = document.get("limits")
    least = limits.get("least_version") if isinstance(limits, Mapping) else None
    if isinstance(least, str) and is_later(least):
        raise too_old(f"It needs potluck {least} or later.")
    format_ = document.get("format")
    if type(format_) is int and format_ > FORMAT:
        raise too_old(f"Its definition is of format {format_}, and this one reads {FORMAT}.")


def is_later(version: str) -> bool:
    """Whether that is a later potluck than this one."""
    return _numbers(version) > _numbers(VERSION)


def _numbers(version: str) -> tuple[int, ...]:
    """To compare by; nothing for what is no version, which is told elsewhere."""
    parts = version[:64].split(".")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return ()
    numbers = [int(part) for part in parts]
    while numbers and not numbers[-1]:  # 1.0 is 1
        numbers.pop()
    return tuple(numbers)


def too_old(why: str) -> NewerPotluckNeeded:
    return NewerPotluckNeeded(
        f"This potluck ({VERSION}) is too old for the run.",
        why=why,
        advice="Update potluck (`git pull` in its checkout), and type the same again.",
    )
