"""A run's definition: what `run.toml` says, read and checked.

    definition = read_definition(text)      # WrongDefinition names what is wrong, and where
    definition.run.name, definition.training.batch
    definition.collaboration_settings(client=False)      # for open_collaboration

Everybody in a run trains by the same definition. What the organiser signs are the very bytes of
the file (node/run/signed.py), so nothing here is ever written back.

Easy to get wrong: the text may come from somebody else. It is bounded in size and depth before it
is parsed, and a newer potluck's definition must end in "this needs version …" and not in "there is
no key …": the format and the least version are looked at before any other key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from auth.fields import RunName
from protocols.errors import PotluckError
from protocols.moshpit.layout import CodecName
from protocols.moshpit.settings import GROUP_SIZE, MATCHMAKING_SECONDS, ROUND_SECONDS

if TYPE_CHECKING:
    from node.checkpoint_keeper import CheckpointSettings
    from protocols.accumulation.collaboration import CollaborationSettings

Precision = Literal["float32", "bf16", "fp16"]
EVERY_SECONDS = 300.0  # as in node/checkpoint_keeper.py, which brings torch

FORMAT = 1
"""Of the file. A potluck that knows only older formats says which version it would need to be."""

LARGEST_TEXT_BYTES = 64 << 10  # of run.toml: some hundred shards by name, and room for comments


class WrongDefinition(PotluckError):
    """What a run.toml says cannot be: a key that there is not, a value out of its range."""

    exit_code = 2


class NewerPotluckNeeded(PotluckError):
    """The run asks for a later version of potluck than this one."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RunSection(_Section, frozen=True, kw_only=True):
    """`[run]`"""

    name: RunName
    description: Annotated[str, Meta(max_length=300)] = ""
    """One line for people, shown to volunteers before they train."""


class TrainingSection(_Section, frozen=True, kw_only=True):
    """`[training]`: how steps are made, the same at all peers."""

    batch: Annotated[int, Meta(ge=1, le=1 << 40)]
    """Samples of one step of all peers together."""
    samples_at_once: Annotated[int, Meta(ge=1, le=1 << 20)] = 32
    """The most samples that one machine computes at once; a weak one takes fewer by itself."""
    steps: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """After how many steps of all peers together the run is over; 0: when it is stopped."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """Of the initial parameters and of the order of the data."""
    precision: Precision = "float32"
    """What passes are computed in where a GPU can: float32, bf16, fp16."""
    max_norm: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """What the averaged gradient is clipped to; without, it is not clipped."""
    delayed: bool = False
    local_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class AveragingSection(_Section, frozen=True, kw_only=True):
    """`[averaging]`: how gradients travel."""

    codec: CodecName | dict[str, CodecName] = "float16"
    """For all parameters, or for each by its name (others: none)."""
    grace_seconds: Annotated[float, Meta(gt=0.0, le=3600.0)] = MATCHMAKING_SECONDS
    round_seconds: Annotated[float, Meta(gt=0.0, le=86_400.0)] = ROUND_SECONDS
    group_size: Annotated[int, Meta(ge=2, le=4096)] = GROUP_SIZE
    parameters_every: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """After so many steps the parameters are averaged, too; 0: never."""


class LimitsSection(_Section, frozen=True, kw_only=True):
    """`[limits]`: who can take part."""

    least_version: Annotated[str, Meta(max_length=32, pattern=r"^\d+(\.\d+){0,3}\Z")] = "0.1.0"
    """Of potluck."""
    memory_mb: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Millions of bytes that a volunteer must have free; 0: what is worked out (costs.py)."""


class CheckpointsSection(_Section, frozen=True, kw_only=True):
    """`[checkpoints]`: what the organiser's peer keeps."""

    every_seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = EVERY_SECONDS
    keep_last: Annotated[int, Meta(ge=1, le=1_000_000)] = 3
    keep_every: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


Table = dict[str, Any]


class RunDefinition(_Section, frozen=True, kw_only=True):
    """All of it. The tables are checked like the sections: `model`, `optimizer`, `schedule` are
    those of models/registry.py, `data` is that of models/data/settings.py, and either of `model`
    and `data` may name a module of the volunteer's own instead (node/run/building.py)."""

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
            client=client,
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
            "precision": self.training.precision,
        }

    def checkpoint_settings(self, folder: Path, model: Mapping[str, Any]) -> CheckpointSettings:
        """For the peer that keeps the run's checkpoints."""
        from node.checkpoint_keeper import CheckpointSettings
        from node.checkpoints import KeepPolicy

        policy = KeepPolicy(self.checkpoints.keep_last, self.checkpoints.keep_every)
        return CheckpointSettings(folder, self.checkpoints.every_seconds, policy, model)


def read_definition(text: str | bytes) -> RunDefinition:
    """What the text of a run.toml says. WrongDefinition names everything that is wrong in it, one
    sentence each; NewerPotluckNeeded comes before that."""
    raise NotImplementedError
